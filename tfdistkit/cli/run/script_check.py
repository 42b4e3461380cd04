"""Checks the script or module of `tfdistkit run`; accepts what `python` would run."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from tfdistkit.cli.hints import type_this, with_workers, without_python
from tfdistkit.errors import nearest
from tfdistkit.launcher.piped_script import STDIN

_ENDINGS = ("*.py", "*.pyz")
_SHEBANG_BYTES = 128
_SHELL = re.compile(rb"#!.*\b(ba|da|k|z)?sh\b")


def script_problem(before: Sequence[str], program: Sequence[str]) -> str | None:
    """Returns the error message for a script, or None.

    Args:
        before: The options before it, for the proposed command.
        program: The script and its arguments.
    """
    script = program[0]
    path = Path(script)
    if not script:
        return "the name of the script is empty."
    if is_pipe(script):
        return None
    if path.is_file():
        return _content_problem(path) if os.access(path, os.R_OK) else f"the script {script!r} cannot be read."
    if path.is_dir():
        if (path / "__main__.py").is_file():
            return None
        message = f"{script!r} is a folder without a __main__.py. Pass a script, or -m and the name of a module."
        return f"{message}{nearest(path.name, _near(path))}"
    if path.name.startswith("python") and len(program) > 1:
        message = f"`{script}` must be left out: the workers run this Python ({sys.executable})."
        return f"{message}\n{type_this(without_python(before, program))}"
    if script.isdecimal() and len(program) > 1:
        message = f"there is no script {script!r}. Put the number of workers after -np."
        return f"{message}\n{type_this(['run', '-np', *program])}"
    if "." in script and os.sep not in script and path.suffix not in (".py", ".pyz") and _is_module(script):
        return (
            f"there is no script {script!r}, but a module of this name.\n{type_this(['run', *before, '-m', *program])}"
        )
    here = path.parent if path.parent.is_dir() else Path()
    return f"there is no script {script!r}.{nearest(path.name, _near(here))}"


def _content_problem(path: Path) -> str | None:
    """Returns the error message for a file that is no Python, but of a kind that users hand over, or None."""
    if path.suffix == ".ipynb":
        return f"{str(path)!r} is a notebook. Make a script of it first: jupyter nbconvert --to script {path}"
    with open(path, "rb") as file:
        first = file.readline(_SHEBANG_BYTES)
    if first.startswith(b"\x7fELF") or _SHELL.match(first):
        return f"{str(path)!r} is not Python. Pass the Python script that it starts, and put other commands before."
    return None


def module_problem(before: Sequence[str], program: Sequence[str]) -> str | None:
    """Returns the error message for a module, or None.

    Args:
        before: The options before it, for the proposed command.
        program: The module and its arguments.
    """
    module = program[0]
    if module.endswith(".py"):
        message = f"there is no module {module!r}: -m takes a module's name, without .py."
        if not Path(module).is_file():
            return message
        return f"{message}\n{type_this(['run', *_without_module_flag(before), *program])}"
    if _is_module(module):
        return None
    return f"there is no module {module!r} in the current folder or among the installed packages."


def workers_missing(before: Sequence[str], program: Sequence[str]) -> str:
    """Returns the error message for a missing number of workers.

    Args:
        before: The options before the script.
        program: The script and its arguments.
    """
    message = "-np, the number of workers, is missing. Put it before the script."
    has_python = Path(program[0]).name.startswith("python") and len(program) > 1
    words = without_python(before, program) if has_python else ["run", *with_workers(before, program)]
    return f"{message}\n{type_this(words)}"


def is_pipe(script: str) -> bool:
    """Returns whether only this process can read a script, once: `-`, a pipe, a process substitution of the shell.

    Args:
        script: The script on the command line.
    """
    if script == STDIN:
        return True
    try:
        kind = os.stat(script).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or _is_descriptor(Path(script))


def piped_elsewhere(script: str) -> str:
    """Returns the error message for a script from a pipe with workers on other hosts.

    Args:
        script: The script on the command line.
    """
    message = (
        f"the script {script!r} comes from a pipe, which is on this machine only; workers on other hosts cannot read"
    )
    return f"{message} it. Save the script to a file that every host has, and pass its name."


def _is_descriptor(path: Path) -> bool:
    """Returns whether a path names a descriptor (`/dev/stdin < script.py`): another file in another process."""
    return str(path.parent) in ("/dev/fd", "/proc/self/fd") or str(path) in ("/dev/stdin", "/dev/stdout", "/dev/stderr")


def _without_module_flag(before: Sequence[str]) -> list[str]:
    return [word for word in before if word not in ("-m", "--module")]


def _near(folder: Path) -> list[str]:
    return [near.name for ending in _ENDINGS for near in folder.glob(ending)]


def _is_module(module: str) -> bool:
    # Checks the first part only: finding a submodule would import its package. Searches the current folder first, as
    # `python -m` does.
    top = module.partition(".")[0]
    return top in sys.builtin_module_names or PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None
