"""The end of the console: what could not be shown is told, and changes the exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.launcher.console import Console
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.result import JobResult

# As for other commands that cannot write what they were asked for.
_LOST_EXIT_CODE = 1


@dataclass(frozen=True)
class Shown:
    """What came of the output.

    Args:
        is_whole: Whether all of it was written where the user wanted it, so that the logs are needed no more.
        exit_code: What the launcher ends with.
    """

    is_whole: bool
    exit_code: int


def end_console(console: Console, result: JobResult, run_dir: Path, signals: Sequence[int]) -> Shown:
    """Waits until all is shown, and tells what is not.

    After a failure for two seconds without a reader: the exit code is wanted. After a success for as long as the
    reader likes, as any command does; a signal ends that.

    Args:
        console: The console.
        result: How the job came out.
        run_dir: Where its logs are.
        signals: The signals that this process was sent; it grows.
    """
    if result.unshown_bytes:
        console.note(
            f"tfdistkit: {result.unshown_bytes:,} bytes of the workers' last output are not shown: nobody read them. "
            f"They are in the logs in {run_dir}."
        )
    if result.outcome is not Outcome.SUCCEEDED:
        is_whole, exit_code = console.finish(), result.exit_code
    else:
        received = len(signals)
        is_whole = console.finish(math.inf, lambda: len(signals) > received)
        exit_code = 0 if is_whole else 128 + signals[received]
    if console.problem:
        is_whole, exit_code = False, exit_code or _LOST_EXIT_CODE
        console.note(f"tfdistkit: the output could not be written ({console.problem}). All of it is in {run_dir}.")
        console.finish()
    return Shown(is_whole and not result.unshown_bytes and not result.incomplete, exit_code)
