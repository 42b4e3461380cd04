"""Trains two examples on two worker processes and on one, and compares results and speed (`make demo`).

    python examples/demo.py [options of simulated.py]

`digits.py` compares the results, `simulated.py` the speed where one process cannot use two cores. The exit code is 1 if
a run fails or if the loss curves differ by more than rounding. A missing speedup is no failure, because it depends on
the machine.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

EXAMPLES = pathlib.Path(__file__).parent
# Relative. Two workers sum in another order than one, so float32 differs in the seventh digit.
LARGEST_DIFFERENCE = 1e-5
TIMEOUT_S = 300


class RunFailed(Exception):
    """A run failed, and its output has been shown."""


def train(example, workers, folder, quiet, *options):
    """Runs an example on `workers` processes and returns its measurements."""
    history_file = folder / f"{example}-{workers}.json"
    command = [sys.executable, "-m", "tfdistkit", "run", "-np", str(workers), str(EXAMPLES / example)]
    shown = " ".join(["tfdistkit", *command[3:6], f"examples/{example}"])
    print(f"$ {shown}", flush=True)
    run = subprocess.run(
        [*command, f"--history_file={history_file}", *options],
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
    )
    if run.returncode != 0:
        if quiet:
            sys.stdout.buffer.write(run.stdout)
        print(f"{shown} failed with exit code {run.returncode}.", flush=True)
        raise RunFailed
    return json.loads(history_file.read_text())


def largest_relative_difference(curve, other):
    if len(curve) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(curve, other))


def compare_results(folder):
    """Trains on two workers and on one, and returns the largest relative difference of the loss curves."""
    print("Two workers train a digit classifier. Then one worker does, for comparison.\n")
    checkpoint = folder / "digits.keras"
    two = train("digits.py", 2, folder, False, f"--checkpoint={checkpoint}")
    one = train("digits.py", 1, folder, True)
    difference = largest_relative_difference(two["loss"], one["loss"])
    print()
    print(f"test accuracy   {two['test_accuracy']:.4f} (one worker: {one['test_accuracy']:.4f})")
    print(f"loss curve      differs from one worker by at most {difference:.1e}, relative")
    print(f"checkpoint      {checkpoint.stat().st_size / 1000:.0f} kB, written by rank 0")
    return difference


def compare_times(folder):
    """Times one worker and two on `simulated.py`; the steps of `digits.py` are too small for a speedup."""
    print("\nNow a model that learns from simulations in Python, which one process runs on one core only.\n")
    one = train("simulated.py", 1, folder, True, *sys.argv[1:])
    two = train("simulated.py", 2, folder, True, *sys.argv[1:])
    before, after = one["seconds_per_epoch"], two["seconds_per_epoch"]
    difference = largest_relative_difference(two["loss"], one["loss"])
    print()
    print(f"loss curve      differs from one worker by at most {difference:.1e}, relative")
    print(f"speed           1 worker: {before:.1f} s per epoch, 2 workers: {after:.1f} s: {gain(before, after)}")
    return difference


def gain(before, after):
    if before / after >= 1.05:
        return f"{before / after:.1f} times as fast"
    return f"no gain (cores that this process may use: {len(os.sched_getaffinity(0))}; is the machine busy?)"


def main():
    with tempfile.TemporaryDirectory(prefix="tfdistkit-demo-") as folder:
        try:
            difference = max(compare_results(pathlib.Path(folder)), compare_times(pathlib.Path(folder)))
        except RunFailed:
            return 1
    if not difference <= LARGEST_DIFFERENCE:
        print(f"\nThat is more than {LARGEST_DIFFERENCE:.0e}: two workers did not compute the results of one.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
