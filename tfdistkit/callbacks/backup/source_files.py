"""The user's source files of a training, so that a resumed one can say which have changed."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import site
import sys
import sysconfig
import types
from collections.abc import Mapping
from typing import Any

import tfdistkit

_LOG = logging.getLogger(__name__)

_MOST_SHOWN = 8


@functools.cache  # What runs is what was imported, whatever is in the files later.
def source_files() -> dict[str, str]:
    """Returns a hash of each source file of the user that this process has imported, by the name of its module.

    Files of Python, of installed packages and of tfdistkit are none.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        path = None if name == "__mp_main__" else getattr(module, "__file__", None)  # another name of `__main__`
        if isinstance(path, str) and path.endswith(".py") and _is_path_of_user(path):
            try:
                with open(path, "rb") as file:
                    found[_shown(name, path)] = hashlib.sha256(file.read()).hexdigest()
            except OSError:  # it was removed
                continue
    return found


def is_of_script(value: Any) -> bool:
    """Returns whether a function, class or module is of the user's source files, or was typed in by the user.

    Args:
        value: The function, class or module.
    """
    if isinstance(value, types.FunctionType):
        return _is_path_of_user(value.__code__.co_filename)
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(value.__module__)
    path = getattr(module, "__file__", None)
    return path is None and getattr(module, "__spec__", None) is None or path is not None and _is_path_of_user(path)


@functools.cache
def _is_path_of_user(path: str) -> bool:
    return not os.path.realpath(path).startswith(_others())


@functools.cache
def _others() -> tuple[str, ...]:
    """Returns the folders of Python, of installed packages and of tfdistkit."""
    paths = sysconfig.get_paths()
    places = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places |= {*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(tfdistkit.__file__)}
    return tuple(os.path.join(os.path.realpath(place), "") for place in places)


def warn_of_changes(then: Mapping[str, str] | None) -> None:
    """Warns of source files that have changed since a backup.

    Args:
        then: `source_files` of the run of the backup; None in older backups.
    """
    now = source_files()
    changed = sorted(name for name, digest in (then or {}).items() if now.get(name, digest) != digest)
    if changed:
        _LOG.warning(
            "BackupAndResume: the code has changed since the backup: %s. Training resumes with the code of now: the "
            "results can differ from those of one run.",
            ", ".join(changed[:_MOST_SHOWN] + ["..."] * (len(changed) > _MOST_SHOWN)),
        )


def _shown(name: str, path: str) -> str:
    return os.path.basename(path) if name == "__main__" else f"{name.replace('.', '/')}.py"
