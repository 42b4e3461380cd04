"""Tracebacks as a user wants to read them: the script's own frames; those of libraries are folded.

Between a `model.fit(...)` and what went wrong in it are dozens of frames of Keras, TensorFlow and this package.
"""

from __future__ import annotations

import itertools
import os
import re
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import tfdistkit
from tfdistkit import env

_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\](keras|tensorflow|tf_keras|horovod|absl|tfdistkit)[/\\]")
# Python's own way from one module to the next.
_IMPORTS = re.compile(r"<frozen importlib\.|.*[/\\]importlib[/\\]__init__\.py$")
_OWN = os.path.join(os.path.dirname(os.path.abspath(tfdistkit.__file__)), "")


def folded(error: BaseException, tb: TracebackType | None) -> str:
    """Returns a traceback as Python prints it, with the frames of libraries folded.

    Args:
        error: The exception.
        tb: Its frames.

    Returns:
        Lines that end in a newline. The same as Python's if nothing can be folded, or `TFDISTKIT_FULL_TRACEBACK` is 1.
    """
    told = traceback.TracebackException(type(error), error, tb)
    if env.text(env.FULL_TRACEBACK) != "1":
        _fold(told, error)
    return "".join(told.format())


def whole(error: BaseException, tb: TracebackType | None) -> str:
    """Returns a traceback as Python prints it.

    Args:
        error: The exception.
        tb: Its frames.
    """
    return "".join(traceback.format_exception(type(error), error, tb))


class _Folded(traceback.StackSummary):
    """Frames of which those of libraries are told by a line, but for the last one, which raised the exception."""

    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        runs = [(is_user, list(run)) for is_user, run in itertools.groupby(self, lambda one: _library(one) is None)]
        for place, (is_user, run) in enumerate(runs):
            if not is_user:
                shown = run[-1:] if place == len(runs) - 1 else []
                hidden = run[: len(run) - len(shown)]
                lines += _told(hidden)
                run = shown
            lines += traceback.StackSummary.from_list(run).format(**options)
        return lines


def _told(hidden: list[traceback.FrameSummary]) -> Iterator[str]:
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


def _fold(told: traceback.TracebackException, error: BaseException | None) -> None:
    told.stack = _Folded(told.stack)
    if getattr(error, "names_lost_peer", False):
        told.__cause__, told.__suppress_context__ = None, True  # It says in a page what the error says in a sentence.
    if told.__cause__ is not None:
        _fold(told.__cause__, getattr(error, "__cause__", None))
    if told.__context__ is not None:
        _fold(told.__context__, getattr(error, "__context__", None))
    for one in getattr(told, "exceptions", None) or ():
        _fold(one, None)
