"""Implements `tfdistkit ps`: lists the jobs of this user on this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdistkit.cli.jobs.choice import for_a_reader
from tfdistkit.cli.jobs.running import Job, running_jobs
from tfdistkit.cli.parser import Parser
from tfdistkit.report.hangs.layout import Notes, Phase, read_notes

_DESCRIPTION = """\
Lists the jobs of this user that run on this machine, with their steps and the memory of their processes. Of a job on
other hosts or in SLURM only what its launcher knows is shown."""

_EPILOG = """\
examples:
  tfdistkit ps
  tfdistkit ps -q            the names only
  tfdistkit ps --json"""

_HEAD = ("JOB", "PID", "SCRIPT", "RANKS", "TIME", "STATE", "STEP", "STEPS/S", "MEMORY")
# A state says since when nothing has happened after so many seconds.
_QUIET_S = 30.0
_WORDS = {
    Phase.START: "starting",
    Phase.SETUP: "starting",
    Phase.STEP: "training",
    Phase.BETWEEN: "training",
    Phase.EVALUATION: "evaluating",
    Phase.SAVE: "saving",
    Phase.OUTSIDE: "after fit",
    Phase.SERVING: "serving",
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit ps`.

    Returns:
        The exit code.
    """
    options = make_parser().parse_args(list(arguments))
    facts = [facts_of(job, time.time(), time.monotonic()) for job in running_jobs()]
    with for_a_reader():
        if options.json:
            print(json.dumps(facts, indent=2))
        elif options.quiet:
            print("".join(f"{one['job']}\n" for one in facts), end="")
        else:
            print(_table([_HEAD, *map(_row, facts)]))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command."""
    parser = Parser(
        prog="tfdistkit ps",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-q", "--quiet", action="store_true", help="show the names of the jobs only")
    how.add_argument("--json", action="store_true", help="print JSON")
    return parser


def facts_of(job: Job, now: float, clock: float) -> dict[str, Any]:
    """Returns what is shown of a job.

    Args:
        job: The job.
        now: The time, in seconds since the epoch.
        clock: The time by `time.monotonic`.
    """
    processes = [one for one in job.processes() if not one.has_ended]
    notes = [found for one in processes if (found := read_notes(one.folder)) is not None]
    # The chief's or the first rank's: in a synchronous job all are at the same step.
    first = notes[0] if notes else None
    rate = first.steps_per_s(clock) if first is not None else None
    return {
        "job": job.name,
        "pid": job.launcher,
        "script": job.program,
        "ranks": len(processes),
        "seconds": round(now - job.started, 1),
        "state": _state(job, notes, clock),
        "step": first.steps if first is not None else None,
        "epoch": first.epoch + 1 if first is not None and first.steps else None,
        "steps_per_second": round(rate, 3) if rate is not None else None,
        "memory_bytes": sum(_memory(one.pid) for one in notes) or None,
        "folder": str(job.run_dir),
    }


def _state(job: Job, notes: Sequence[Notes], clock: float) -> str:
    if job.events[0]["event"] == "job_submitted":
        return "in SLURM"
    if not notes:
        return "restarting" if job.events[-1]["event"] == "job_restarting" else "running"
    state = _WORDS[notes[0].phase]
    quiet_s = clock - max(one.since for one in notes)
    if quiet_s > _QUIET_S and notes[0].has_begun:
        return f"{state}, no step for {quiet_s:.0f} s"
    return f"{state}, epoch {notes[0].epoch + 1}" if notes[0].steps else state


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    rate, memory = facts["steps_per_second"], facts["memory_bytes"]
    minutes, seconds = divmod(int(facts["seconds"]), 60)
    cells = (
        facts["job"], facts["pid"], facts["script"], facts["ranks"] or None,
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}", facts["state"], facts["step"],
        None if rate is None else f"{rate:.3g}", None if memory is None else f"{memory / 1e9:.1f} GB",
    )  # fmt: skip
    return tuple("-" if cell is None else str(cell) for cell in cells)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _memory(pid: int) -> int:
    """Returns the resident memory of a process in bytes; 0 if it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
