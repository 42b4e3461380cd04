"""Is there what `tfdistkit run` is to start? What `python` would run, these take too."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from tfdistkit.cli.hints import type_this, with_workers, without_python
from tfdistkit.errors import nearest
from tfdistkit.launcher.piped_script import STDIN

_ENDINGS = ("*.py", "*.pyz")


def script_problem(before: Sequence[str], program: Sequence[str]) -> str | None:
    """Returns what is wrong with a script, or None.

    Args:
        before: The options before it, for a command that is right.
        program: The script and its arguments.
    """
    script = program[0]
    path = Path(script)
    if not script:
        return "the name of the script is empty."
    if is_pipe(script):
        return None
    if path.is_file():
        return None if os.access(path, os.R_OK) else f"the script {script!r} cannot be read."
    if path.is_dir():
        if (path / "__main__.py").is_file():
            return None
        told = f"{script!r} is a folder without a __main__.py. Expected a script, or -m and the name of a module."
        return f"{told}{nearest(path.name, _near(path))}"
    if path.name.startswith("python") and len(program) > 1:
        told = f"`{script}` is not needed: the workers run this Python ({sys.executable})."
        return f"{told}\n{type_this(without_python(before, program))}"
    if script.isdecimal() and len(program) > 1:
        told = f"there is no script {script!r}. If it is the number of workers, it stands behind -np."
        return f"{told}\n{type_this(['run', '-np', *program])}"
    if "." in script and os.sep not in script and path.suffix not in (".py", ".pyz") and _is_module(script):
        return f"there is no script {script!r}, but a module.\n{type_this(['run', *before, '-m', *program])}"
    here = path.parent if path.parent.is_dir() else Path()
    return f"there is no script {script!r}.{nearest(path.name, _near(here))}"


def module_problem(before: Sequence[str], program: Sequence[str]) -> str | None:
    """Returns what is wrong with a module, or None.

    Args:
        before: The options before it, for a command that is right.
        program: The module and its arguments.
    """
    module = program[0]
    if module.endswith(".py"):
        told = f"there is no module {module!r}: -m takes a module's name, without .py."
        if not Path(module).is_file():
            return told
        return f"{told}\n{type_this(['run', *_without_module_flag(before), *program])}"
    if _is_module(module):
        return None
    return f"there is no module {module!r} in the current folder or among the installed packages."


def workers_missing(before: Sequence[str], program: Sequence[str]) -> str:
    """Returns what to tell where nobody said how many workers there shall be.

    Args:
        before: The options before the script.
        program: The script and its arguments.
    """
    told = "-np, the number of workers, is missing. It stands before the script."
    has_python = Path(program[0]).name.startswith("python") and len(program) > 1
    words = without_python(before, program) if has_python else ["run", *with_workers(before, program)]
    return f"{told}\n{type_this(words)}"


def is_pipe(script: str) -> bool:
    """Returns whether a script can be read only once, and by us: `-`, a pipe, a process substitution of the shell.

    Args:
        script: As it stands on the command line.
    """
    if script == STDIN:
        return True
    try:
        kind = os.stat(script).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or _is_descriptor(Path(script))


def piped_elsewhere(script: str) -> str:
    """Returns what is wrong with a script from a pipe where the workers are not on this machine.

    Args:
        script: As it stands on the command line.
    """
    told = f"the script {script!r} comes from a pipe, which is on this machine only; workers on other hosts cannot read"
    return f"{told} it. Expected: a file that every host has. Save it to one, and name that."


def _is_descriptor(path: Path) -> bool:
    """`/dev/stdin < script.py`: a file, but another one in another process."""
    return str(path.parent) in ("/dev/fd", "/proc/self/fd") or str(path) in ("/dev/stdin", "/dev/stdout", "/dev/stderr")


def _without_module_flag(before: Sequence[str]) -> list[str]:
    return [word for word in before if word not in ("-m", "--module")]


def _near(folder: Path) -> list[str]:
    return [near.name for ending in _ENDINGS for near in folder.glob(ending)]


def _is_module(module: str) -> bool:
    # Only the first part: finding a submodule means importing what is around it. As `python -m`, which looks in the
    # current folder first.
    top = module.partition(".")[0]
    return top in sys.builtin_module_names or PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None
