"""The argument JOB of the commands for jobs: which job is meant."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdistkit.cli.jobs.running import Job, read_job, running_jobs
from tfdistkit.cli.parser import Parser
from tfdistkit.errors import OptionError, explain

NO_JOB_EXIT_CODE = 1


def make_job_parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Makes the parser of a command for one job.

    Args:
        command: The name of the command.
        description: What it does.
        epilog: Its examples.
    """
    parser = Parser(
        prog=f"tfdistkit {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = "the job: its name in `tfdistkit ps`, the pid of its launcher, or its run folder (default: the only one)"
    argument: Any = parser.add_argument("job", nargs="?", metavar="JOB", help=what)
    argument.completer = _offered  # of argcomplete
    return parser


def add_ranks_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Adds the option that selects processes of a job.

    Args:
        parser: The parser.
        help_text: Its help.
    """
    parser.add_argument("-r", "--rank", action="append", default=[], metavar="RANK", help=help_text)


def choose_job(given: str | None) -> Job:
    """Returns the job that is meant.

    Args:
        given: The argument JOB.

    Raises:
        OptionError: if there is no such job, or if it is missing while several jobs run.
    """
    jobs = running_jobs()
    if given is None:
        if len(jobs) == 1:
            return jobs[0]
        what = "JOB must be given while several jobs run." if jobs else "A job must run on this machine."
        raise OptionError(explain(what, received=_running(jobs), do="Show all: tfdistkit ps" if jobs else None))
    found = [job for job in jobs if job.name.startswith(given) or str(job.launcher) == given]
    found = [job for job in found if given in (job.name, str(job.launcher))] or found
    if not found and Path(given).is_dir():
        folder = Path(given).resolve()
        ended = read_job(folder)
        found = [job for job in jobs if job.run_dir.resolve() == folder] or ([ended] if ended is not None else [])
    if len(found) == 1:
        return found[0]
    what = "JOB must name one job of this user on this machine."
    raise OptionError(explain(what, received=f"{given!r}, and {_running(found or jobs)}"))


@contextlib.contextmanager
def for_a_reader() -> Iterator[None]:
    """Lets its body print to a reader that may end before, as `| head` does."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"tfdistkit: the output could not be written: {error}", file=sys.stderr)
            sys.exit(1)


def _running(jobs: list[Job]) -> str:
    listed = ", ".join(f"{job.name} ({job.program})" for job in jobs)
    return f"running jobs: {listed}" if jobs else "no running job of this user"


def _offered(**_: Any) -> list[str]:
    return [job.name for job in running_jobs()]
