"""What is shown, and what is not: values of variables, and output at the end of the console that nobody took."""

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

# As for other commands that cannot write what they were asked for.
_LOST_EXIT_CODE = 1
_HIDDEN = shlex.quote(HIDDEN)


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


def shown_value(name: str, value: str) -> str:
    """Returns a variable's value as a shell would take it, and as others may read it on a terminal or in a log.

    Args:
        name: The variable.
        value: Its value.

    Returns:
        The value; `"$NAME"` where this shell has the same, and `'(hidden)'` for what is secret by its name, or is a
        URL with a password.
    """
    if is_secret(name, value):
        return _HIDDEN
    return f'"${name}"' if len(value) > 1 and env.child_env({}).get(name) == value else shlex.quote(value)


def without_secrets(script: str, variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Returns a script in which secret values are hidden.

    Args:
        script: What sets variables and runs a command, quoted as for a shell.
        variables: The variables.
        command: The command.
    """
    script = script.replace(shlex.join(command), shlex.join(without_secrets_in(command)))
    for name, value in variables.items():
        if value and is_secret(name, value):
            script = script.replace(f"{name}={shlex.quote(value)}", f"{name}={_HIDDEN}")
    return script
