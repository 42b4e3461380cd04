"""Formats tracebacks with the script's own frames, and folds those of libraries.

Between `model.fit(...)` and the error in it are dozens of frames of Keras, TensorFlow and this package.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import tfdistkit
from tfdistkit import env

_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\](keras|tensorflow|tf_keras|horovod|absl|tfdistkit)[/\\]")
# Frames of Python's import system.
_IMPORTS = re.compile(r"<frozen importlib\.|.*[/\\]importlib[/\\]__init__\.py$")
_OWN = os.path.join(os.path.dirname(os.path.abspath(tfdistkit.__file__)), "")
# Packages whose lines are not the user's, and the folders of the standard library.
_PACKAGES = frozenset(("keras", "tensorflow", "tf_keras", "horovod", "absl", "tfdistkit"))
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


def is_of_library(frame: Any) -> bool:
    """Returns whether a frame runs code of this package, Keras, TensorFlow or Python's standard library.

    A script in a folder of the standard library (`/usr/lib/python3/train.py`) is the user's: no module has its name.

    Args:
        frame: A frame of a running thread.
    """
    file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if file.startswith((_OWN, "<")) or "__autograph_generated_file" in file:
        return True
    if package in _PACKAGES:
        return bool(_LIBRARIES.search(file)) or f"{os.sep}{package}{os.sep}" in file
    return package in sys.stdlib_module_names and file.startswith(_STANDARD)


def folded(error: BaseException, tb: TracebackType | None) -> str:
    """Returns a traceback as Python prints it, with the frames of libraries folded.

    Args:
        error: The exception.
        tb: Its frames.

    Returns:
        Lines that end in a newline. Unchanged without library frames, or if `TFDISTKIT_FULL_TRACEBACK` is 1.
    """
    exception = traceback.TracebackException(type(error), error, tb)
    if env.text(env.FULL_TRACEBACK) != "1":
        _fold(exception, error)
    return "".join(exception.format())


def whole(error: BaseException, tb: TracebackType | None) -> str:
    """Returns a traceback as Python prints it.

    Args:
        error: The exception.
        tb: Its frames.
    """
    return "".join(traceback.format_exception(type(error), error, tb))


class _Folded(traceback.StackSummary):
    """Formats frames with those of libraries folded into a line, except the last one, which raised the exception."""

    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        runs = [(is_user, list(run)) for is_user, run in itertools.groupby(self, lambda one: _library(one) is None)]
        for place, (is_user, run) in enumerate(runs):
            if not is_user:
                shown = run[-1:] if place == len(runs) - 1 else []
                hidden = run[: len(run) - len(shown)]
                lines += _count_line(hidden)
                run = shown
            lines += traceback.StackSummary.from_list(run).format(**options)
        return lines


def _count_line(hidden: list[traceback.FrameSummary]) -> Iterator[str]:
    if hidden:
        names = ", ".join(dict.fromkeys(str(_library(one)) for one in hidden))
        frames = "1 frame" if len(hidden) == 1 else f"{len(hidden)} frames"
        yield f"  ... {frames} of {names}; --full-traceback shows them\n"


def _library(frame: traceback.FrameSummary) -> str | None:
    found = _LIBRARIES.search(frame.filename)
    if found is not None:
        return found[1]
    if _IMPORTS.match(frame.filename):
        return "importlib"
    return "tfdistkit" if frame.filename.startswith(_OWN) else None


def _fold(exception: traceback.TracebackException, error: BaseException | None) -> None:
    exception.stack = _Folded(exception.stack)
    if getattr(error, "names_lost_peer", False):
        exception.__cause__, exception.__suppress_context__ = None, True  # A long form of this error's own text.
    if exception.__cause__ is not None:
        _fold(exception.__cause__, getattr(error, "__cause__", None))
    if exception.__context__ is not None:
        _fold(exception.__context__, getattr(error, "__context__", None))
    for one in getattr(exception, "exceptions", None) or ():
        _fold(one, None)
