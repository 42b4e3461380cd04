"""Startup times without TensorFlow: `import tfdistkit`, `tfdistkit --help`, and the launcher.

Compares with `python -c pass`, and `tfdistkit run -np 2` with starting the same two processes by hand (goal: at most
0.5 s more). Run: python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pairs

_PYTHON = sys.executable


def seconds_of(*commands: list[str]) -> Callable[[], float]:
    """Returns a call that runs commands at the same time and returns the seconds until all have ended."""

    def run() -> float:
        start = time.perf_counter()
        running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for c in commands]
        # Without a timeout: with one, Python polls for the end at intervals.
        if any([process.wait() for process in running]):
            raise SystemExit(f"failed: {commands}")
        return time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "nothing.py")
        script.write_text("pass\n")
        variants = {
            "python -c pass": seconds_of([_PYTHON, "-c", "pass"]),
            "import tfdistkit": seconds_of([_PYTHON, "-c", "import tfdistkit"]),
            "tfdistkit --help": seconds_of([_PYTHON, "-m", "tfdistkit", "--help"]),
            "two scripts by hand": seconds_of(*[[_PYTHON, str(script)]] * 2),
            "tfdistkit run -np 2": seconds_of([_PYTHON, "-m", "tfdistkit", "run", "-np", "2", str(script)]),
        }
        results = pairs.in_turn(variants, args.rounds)
    pairs.show(results, "python -c pass", "s")
    more = [a - b for a, b in zip(results["tfdistkit run -np 2"], results["two scripts by hand"])]
    print(f"the launcher takes {statistics.median(more):.3f} s more than starting the two by hand")


if __name__ == "__main__":
    main()
