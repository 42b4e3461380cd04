# PYTHON_ARGCOMPLETE_OK: enables argcomplete's global completion for this command.
"""Runs `tfdistkit <command> ...`, and imports only the module of that command."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from tfdistkit import __version__
from tfdistkit.errors import TfdistkitError, nearest
from tfdistkit.launcher.output.sinks import open_descriptors

# Name -> (module with `main(arguments) -> exit code` and `make_parser()`, summary).
# A new command is one file and one row.
COMMANDS = {
    "run": ("tfdistkit.cli.run.command", "start a script in several worker processes"),
    "ps": ("tfdistkit.cli.jobs.ps", "list the jobs that run on this machine"),
    "logs": ("tfdistkit.cli.jobs.logs", "show what the workers of a job print"),
    "stop": ("tfdistkit.cli.jobs.stop", "end a job from another terminal"),
    "stacks": ("tfdistkit.cli.jobs.stacks", "show where the ranks of a job are"),
    "env": ("tfdistkit.cli.env", "show the cluster of this process, and where it is read from"),
    "data": ("tfdistkit.cli.data", "write data sets as evenly sharded TFRecords"),
    "horovod": ("tfdistkit.cli.horovod", "build, install and check Horovod"),
    "doctor": ("tfdistkit.cli.doctor", "check versions, devices and hosts; try the strategies"),
    "clean": ("tfdistkit.cli.clean", "remove run folders of jobs that have ended"),
    "k8s": ("tfdistkit.cli.k8s", "write a manifest for Kubernetes"),
}

USAGE_EXIT_CODE = 2
# Set by the shell's completion when it runs this command for proposals.
_COMPLETION = "_ARGCOMPLETE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows `tfdistkit`; None takes this process's.

    Returns:
        The exit code.
    """
    open_descriptors()
    if _COMPLETION in os.environ:
        from tfdistkit.cli.completion import complete

        complete(COMMANDS)  # returns if argcomplete is not installed
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help_text())
        return 0 if words else USAGE_EXIT_CODE
    if words[0] in ("-V", "--version"):
        print(f"tfdistkit {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(_unknown(words), file=sys.stderr)
        return USAGE_EXIT_CODE
    try:
        code: int = importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])
        return code
    except TfdistkitError as error:  # such as a package whose entry point cannot be loaded
        print(f"tfdistkit {words[0]}: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:  # outside of the time when workers run
        return 128 + signal.SIGINT


def _help_text() -> str:
    rows = "\n".join(f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: tfdistkit <command> ...\n\n"
        "Distributed training for Keras 3 on TensorFlow.\n\n"
        f"commands:\n{rows}\n\n"
        "options:\n"
        "  -h, --help   show this text; `tfdistkit <command> --help` shows its options\n"
        "  --version    show the version"
    )


def _unknown(words: Sequence[str]) -> str:
    from tfdistkit.cli.hints import guess_command, type_this  # loaded only for an error

    guess = guess_command(words)
    if guess is None:
        message = f"there is no command {words[0]!r}.{nearest(words[0], list(COMMANDS))}"
        return f"tfdistkit: {message}\nExpected one of: {', '.join(COMMANDS)}. See `tfdistkit --help`."
    message = "the first word must be a command" if guess[0] == "run" else f"there is no command {words[0]!r}"
    return f"tfdistkit: {message}.\n{type_this(guess)}\nSee `tfdistkit --help`."
