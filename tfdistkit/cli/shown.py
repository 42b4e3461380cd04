"""Ends the console's output, and hides secret values of variables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit import env
from tfdistkit.launcher.output.console import Console
from tfdistkit.report.secret_values import HIDDEN, is_secret, without_secrets_in
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.result import JobResult

# The exit code of common commands whose output cannot be written.
_LOST_EXIT_CODE = 1
_HIDDEN = shlex.quote(HIDDEN)


@dataclass(frozen=True)
class Shown:
    """Holds the result of `end_console`.

    Args:
        is_whole: Whether all output was written, so that the logs may be removed.
        exit_code: The exit code of the launcher.
    """

    is_whole: bool
    exit_code: int


def end_console(console: Console, result: JobResult, run_dir: Path, signals: Sequence[int]) -> Shown:
    """Waits until all output is read, and reports output that is not shown.

    After a failure, waits two seconds for a stalled reader, because the caller needs the exit code. After a success,
    waits without a timeout, as any command does, or until a signal.

    Args:
        console: The console.
        result: The result of the job.
        run_dir: The run folder with the logs.
        signals: The signals that this process received; it grows.
    """
    if result.unshown_bytes:
        console.note(
            f"tfdistkit: {result.unshown_bytes:,} bytes of the workers' last output are not shown, because stdout or "
            f"stderr was not read. Read the logs in {run_dir}."
        )
    if result.outcome is not Outcome.SUCCEEDED:
        is_whole, exit_code = console.finish(), result.exit_code
    else:
        received = len(signals)
        is_whole = console.finish(math.inf, lambda: len(signals) > received)
        exit_code = 0 if is_whole else 128 + signals[received]
    if console.problem:
        is_whole, exit_code = False, exit_code or _LOST_EXIT_CODE
        console.note(f"tfdistkit: the output could not be written ({console.problem}). Read the logs in {run_dir}.")
        console.finish()
    return Shown(is_whole and not result.unshown_bytes and not result.incomplete, exit_code)


def shown_value(name: str, value: str) -> str:
    """Returns a variable's value quoted for a shell, with secrets hidden, for a terminal or a log.

    Args:
        name: The variable.
        value: Its value.

    Returns:
        The value; `"$NAME"` if this shell has the same one; `'(hidden)'` if the name says that it is secret, or it is a
        URL with a password.
    """
    if is_secret(name, value):
        return _HIDDEN
    return f'"${name}"' if len(value) > 1 and env.child_env({}).get(name) == value else shlex.quote(value)


def without_secrets(script: str, variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Returns a script in which secret values are hidden.

    Args:
        script: Text that sets variables and runs a command, quoted for a shell.
        variables: The variables.
        command: The command.
    """
    script = script.replace(shlex.join(command), shlex.join(without_secrets_in(command)))
    for name, value in variables.items():
        if value and is_secret(name, value):
            script = script.replace(f"{name}={shlex.quote(value)}", f"{name}={_HIDDEN}")
    return script
