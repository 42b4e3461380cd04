"""Implements `tfdistkit logs`: shows what the processes of a job print, and follows it."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from tfdistkit.cli.jobs.choice import NO_JOB_EXIT_CODE, add_ranks_option, choose_job, for_a_reader, make_job_parser
from tfdistkit.cli.jobs.running import Job, JobProcess, read_job, running_jobs
from tfdistkit.cli.jobs.stacks import select_processes
from tfdistkit.errors import OptionError
from tfdistkit.launcher.output.console import LineBuffer
from tfdistkit.report.startup_lines import StartupLines

_DESCRIPTION = """\
Shows what the processes of a job have printed, with the rank in front of each line. TensorFlow's start-up lines are
left out; the files in the run folder have every byte."""

_EPILOG = """\
examples:
  tfdistkit logs                      of the only job
  tfdistkit logs -f -n 20 1f6b0c2a    the last 20 lines of each rank, and what follows
  tfdistkit logs -r 1 logs/           of rank 1, from the folder of a job that may have ended

exit codes:
  0; 1 there is no such job"""

_POLL_S = 0.2
# How often to look for new processes, after a restart, and for the end of the job.
_LOOK_S = 1.0


class _Tail:
    """One file that grows."""

    def __init__(self, process: JobProcess, stream: str, last: int | None):
        self._path, self._label, self._last = process.folder / stream, f"[{process.name.label}] ".encode(), last
        self._out: BinaryIO = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        self._lines, self._offset = LineBuffer(), 0
        self._startup = StartupLines() if stream == "stderr" else None

    def show(self, is_end: bool = False) -> bool:
        """Shows what is new; returns whether there was something.

        Args:
            is_end: Whether an unfinished line is shown, too.
        """
        data = self._read()
        shown = data if self._startup is None else self._startup.pass_on(data)
        if is_end and self._startup is not None:
            shown += self._startup.let_go()
        lines = self._lines.push(shown)
        if is_end and self._lines.unfinished:
            lines.append(self._lines.unfinished)
        if self._last is not None:  # Of what was there at the start only the last lines.
            lines, self._last = lines[-self._last :] if self._last else [], None
        self._out.write(b"".join(self._label + line + b"\n" for line in lines))
        self._out.flush()
        return bool(data)

    def _read(self) -> bytes:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            self._offset += len(data)
            return data
        return b""


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit logs`.

    Returns:
        The exit code.
    """
    options = make_parser().parse_args(list(arguments))
    try:
        job = choose_job(options.job)
        select_processes(job, options.rank)
    except OptionError as error:
        print(f"tfdistkit logs: {error}", file=sys.stderr)
        return NO_JOB_EXIT_CODE
    with for_a_reader():
        _show(job, options)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command."""
    parser = make_job_parser("logs", _DESCRIPTION, _EPILOG)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    parser.add_argument("-n", "--tail", type=int, metavar="N", help="show the last N lines of each file only")
    add_ranks_option(parser, "show this rank, or `chief`, `ps.0`, `worker.1` with --ps; can be given several times")
    return parser


def _show(job: Job, options: argparse.Namespace) -> None:
    tails: dict[Path, _Tail] = {}

    def add(found: Job, last: int | None) -> None:
        for process in select_processes(found, options.rank):
            for stream in ("stdout", "stderr"):
                tails.setdefault(process.folder / stream, _Tail(process, stream, last))

    add(job, options.tail)
    follows = options.follow and job.launcher is not None
    for tail in tails.values():
        tail.show(is_end=not follows)
    if follows:
        _follow(job, tails, lambda found: add(found, None))


def _follow(job: Job, tails: dict[Path, _Tail], add: Callable[[Job], None]) -> None:
    look_at = 0.0
    while True:
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + _LOOK_S
            is_over = not any(one.run_dir == job.run_dir for one in running_jobs())
            found = read_job(job.run_dir)
            if found is not None:
                with contextlib.suppress(OptionError):  # The new attempt has not started this rank yet.
                    add(found)
        any_new = [tail.show(is_end=is_over) for tail in list(tails.values())]
        if is_over:
            return
        if not any(any_new):
            time.sleep(_POLL_S)
