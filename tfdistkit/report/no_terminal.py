"""Explains errors of workers that read from the terminal: they have none."""

from __future__ import annotations

import os
import sys

from tfdistkit import env

# The message of `input()`; that of `getpass` is empty, as for other ends of input.
_END_OF_INPUT = "EOF when reading a line"
_ASKED = (
    "Workers have no terminal: their standard input is empty. Pass the answer as an argument of the script (`tfdistkit "
    "run -np 2 train.py --name value`) or as a variable (--env NAME=VALUE). A single worker (-np 1) can read it."
)
_DEBUGGED = "Workers have no terminal for the debugger. Debug a single worker: `tfdistkit run -np 1 train.py`."


def explain_empty_input(error: BaseException) -> None:
    """Adds an explanation to an exception that comes from empty standard input.

    Args:
        error: The unhandled exception of a worker.
    """
    if env.text(env.TASK_DIR) is None or not _reads_nothing():
        return
    if isinstance(error, EOFError) and (error.args == (_END_OF_INPUT,) or _is_of_getpass(error)):
        error.args = (f"{_END_OF_INPUT}\n{_ASKED}",)
    elif not error.args and type(error) is getattr(sys.modules.get("bdb"), "BdbQuit", None):
        error.args = (_DEBUGGED,)


def _is_of_getpass(error: EOFError) -> bool:
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return not error.args and tb is not None and tb.tb_frame.f_globals.get("__name__") == "getpass"


def _reads_nothing() -> bool:
    try:
        return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True
