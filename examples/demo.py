"""Trains two examples on two worker processes and on one, and compares: what `make demo` runs.

    python examples/demo.py [options of simulated.py]

`digits.py` shows that two workers compute what one computes, `simulated.py` what they gain where one process cannot use
two cores. Ends with exit code 1 if a run fails or if the loss curves differ by more than rounding; not if nothing is
gained, for that is up to the machine.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

EXAMPLES = pathlib.Path(__file__).parent
# The sums of two workers are added in another order than those of one: float32 differs in the seventh digit.
LARGEST_DIFFERENCE = 1e-5
TIMEOUT_S = 300


class RunFailed(Exception):
    """What was shown of a run that failed has to do."""


def train(example, workers, folder, quiet, *options):
    """Runs an example on `workers` processes and returns what it measured."""
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
    """Do two workers compute what one computes?"""
    print("Two workers train a digit classifier. Then one does, for comparison.\n")
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
    """Are two workers faster? In `digits.py` a step is too small to be shared; here each has a lot to compute."""
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
        print(f"\nThat is more than {LARGEST_DIFFERENCE:.0e}: two workers did not compute what one computes.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
