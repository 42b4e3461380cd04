"""Run the commands of a build, with their output in a log, and with a timeout."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdistkit import env
from tfdistkit.errors import BuildFailedError, explain
from tfdistkit.horovod_build.first_error import first_error

_POLL_S = 0.2
# Interval of progress messages for a long command.
_SAY_S = 30.0
# How much of the end of the log is searched for the progress of the build.
_TAIL_BYTES = 16_384
_PERCENT = re.compile(r"\[ *(\d+)%\]")

Say = Callable[[str], None]


def run_logged(
    what: str,
    command: Sequence[str],
    log: Path,
    *,
    say: Say,
    timeout_s: float,
    variables: Mapping[str, str | None] | None = None,
    do: str | None = None,
) -> None:
    """Runs a command, and appends its output to a log.

    Args:
        what: The purpose of the command, as the subject of a sentence: "The download of Horovod".
        command: The command.
        log: The log.
        say: Called with a progress message from time to time.
        timeout_s: The timeout, in seconds.
        variables: Its variables, which override those of this process; None removes one.
        do: The fix to suggest when it fails.

    Raises:
        BuildFailedError: if it fails; the message holds the first real error of its output.
    """
    with log.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            command,
            env=env.child_env(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Its own process group, so that compilers that it started end with it.
            start_new_session=True,
        )
    try:
        ended = _wait(process, log, say, timeout_s)
    finally:
        _end_group(process)
    if ended != 0:
        problem = f"did not end within {timeout_s:g} s" if ended is None else "failed"
        with log.open("rb") as file:
            file.seek(begin)
            printed = file.read().decode(errors="replace")
        cause = first_error(printed).replace("\n", "\n    ")
        next_step = f"\n{do}" if do else ""
        raise BuildFailedError(
            explain(f"{what} {problem}. The first error is:\n    {cause}\nThe full log: {log}{next_step}")
        )


def _wait(process: subprocess.Popen[bytes], log: Path, say: Say, timeout_s: float) -> int | None:
    """Returns the exit code; None after the timeout."""
    started = said = time.monotonic()
    while (now := time.monotonic()) - started < timeout_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        if now - said >= _SAY_S:
            said = now
            say(f"  {now - started:.0f} s{_percent(log)}")
    return None


def _percent(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        found = _PERCENT.findall(file.read().decode(errors="replace"))
    return f", {found[-1]} %" if found else ""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
