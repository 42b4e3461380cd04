"""Implements `tfdistkit stop`: ends a job from another terminal."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

from tfdistkit.cli.jobs.choice import NO_JOB_EXIT_CODE, choose_job, make_job_parser
from tfdistkit.cli.jobs.running import Job, running_jobs
from tfdistkit.errors import OptionError, explain

_DESCRIPTION = """\
Ends a job as a scheduler does: its workers get SIGTERM, and may make a last backup (BackupAndResume). After --time
seconds all of its processes are killed. Waits until the job has ended."""

_EPILOG = """\
examples:
  tfdistkit stop                  the only job
  tfdistkit stop 1f6b0c2a
  tfdistkit stop --time 120 1f6b0c2a

exit codes:
  0 the job has ended; 1 there is no such job, or it did not end"""

# The launcher gives its workers 30 seconds for a backup, and then 5 to exit.
_DEFAULT_S = 45.0
# The launcher kills its workers at once after a second signal; its watchdog does if it is killed itself.
_KILLED_S = 10.0
# Two signals of a kind that a process has not noticed yet are one.
_NOTICED_S = 0.5
_POLL_S = 0.05


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit stop`.

    Returns:
        The exit code.
    """
    options = make_parser().parse_args(list(arguments))
    try:
        job = choose_job(options.job)
        if job.launcher is None:
            raise OptionError(explain("JOB must be a running job.", received=f"{job.run_dir}, which has ended"))
    except OptionError as error:
        print(f"tfdistkit stop: {error}", file=sys.stderr)
        return NO_JOB_EXIT_CODE
    print(f"tfdistkit: stopping {job.name} ({job.program}).", flush=True)
    started = time.monotonic()
    # A process that called `tfdistkit.launch` is the user's own, and goes on: as after Ctrl-C.
    kind = signal.SIGINT if job.is_call else signal.SIGTERM
    for number, wait_s in [
        (kind, options.time),
        (kind, _KILLED_S),
        *([] if job.is_call else [(signal.SIGKILL, _KILLED_S)]),
    ]:
        if _ends(job, number, wait_s):
            print(f"tfdistkit: {job.name} has ended after {time.monotonic() - started:.1f} s.")
            return 0
        print(
            f"tfdistkit: {job.name} has not ended within {wait_s:g} s of {signal.Signals(number).name}.",
            file=sys.stderr,
        )
    return NO_JOB_EXIT_CODE


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command."""
    parser = make_job_parser("stop", _DESCRIPTION, _EPILOG)
    wait = f"how long the job may take before it is killed (default: {_DEFAULT_S:g})"
    parser.add_argument("-t", "--time", type=_seconds, default=_DEFAULT_S, metavar="SECONDS", help=wait)
    return parser


def _ends(job: Job, number: int, wait_s: float) -> bool:
    """Sends a signal to the launcher; returns whether the job ends within a time."""
    assert job.launcher is not None
    try:
        launcher = os.pidfd_open(job.launcher)
    except ProcessLookupError:
        return True
    try:
        # The number may have been used again since the job was found; from here on it is this process.
        if not _runs(job):
            return True
        signal.pidfd_send_signal(launcher, number)
        deadline = time.monotonic() + max(wait_s, _NOTICED_S)
        while time.monotonic() < deadline:
            if select.select([launcher], [], [], _POLL_S)[0] or (job.is_call and not _runs(job)):
                return True
        return False
    finally:
        os.close(launcher)


def _runs(job: Job) -> bool:
    return any((one.launcher, one.run_dir) == (job.launcher, job.run_dir) for one in running_jobs())


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise ValueError(text)
    return seconds


_seconds.__name__ = "number of seconds"
