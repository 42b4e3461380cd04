"""Trains `digits.py` on two worker processes, then on one, and compares: what `make demo` runs.

    python examples/demo.py

Ends with exit code 1 if a run fails or if the loss curves differ by more than rounding.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

DIGITS = pathlib.Path(__file__).with_name("digits.py")
# The sums of two workers are added in another order than those of one: float32 differs in the seventh digit.
LARGEST_DIFFERENCE = 1e-5
TIMEOUT_S = 300


def train(workers, folder, quiet):
    """Runs the example on `workers` processes and returns what it measured, or None if it failed."""
    history_file = folder / f"history-{workers}.json"
    command = [sys.executable, "-m", "tfdistkit", "run", "-np", str(workers), str(DIGITS)]
    command += [f"--history_file={history_file}", f"--checkpoint={folder / f'digits-{workers}.keras'}"]
    shown = " ".join(["tfdistkit", *command[3:7]])
    print(f"$ {shown}", flush=True)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    run = subprocess.run(
        command,
        env=environment,
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
    )
    if run.returncode != 0:
        if quiet:
            sys.stdout.buffer.write(run.stdout)
        print(f"{shown} failed with exit code {run.returncode}.", flush=True)
        return None
    return json.loads(history_file.read_text())


def largest_relative_difference(curve, other):
    if len(curve) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(curve, other))


def main():
    with tempfile.TemporaryDirectory(prefix="tfdistkit-demo-") as folder:
        two = train(2, pathlib.Path(folder), quiet=False)
        one = train(1, pathlib.Path(folder), quiet=True) if two else None
        if not two or not one:
            return 1
        checkpoint = pathlib.Path(folder, "digits-2.keras").stat().st_size
    difference = largest_relative_difference(two["loss"], one["loss"])
    print()
    print(f"test accuracy        {two['test_accuracy']:.4f} (one worker: {one['test_accuracy']:.4f})")
    print(f"examples per second  {two['examples_per_second']:.0f} (one worker: {one['examples_per_second']:.0f})")
    print(f"checkpoint           {checkpoint / 1000:.0f} kB, written by the chief")
    print(f"loss curve           differs from one worker by at most {difference:.1e}, relative")
    if not difference <= LARGEST_DIFFERENCE:
        print(f"That is more than {LARGEST_DIFFERENCE:.0e}: two workers did not compute what one computes.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
