"""The end of a process whose job is broken.

Threads of TensorFlow still wait for the task that is gone when a coordinator ends, and now and then crash it with what
is taken down under them (`Mutex corrupt`, SIGSEGV): then its exit code, and what the user reads last, tell no reason.

Exit functions run in the opposite order of their registration, and only the last can end the process without taking one
from the user. So this module is imported early: by the frame of a worker, or else by the strategy.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys

# What Python ends with after an exception that nobody caught.
_EXIT_CODE = 1

_is_broken = False


def leave_at_once() -> None:
    """Lets this process end without destructors, if an exception ends it; to be called when tasks of its job are gone.

    `sys.exit` and Ctrl-C are left to Python, which alone knows the exit code.
    """
    global _is_broken
    _is_broken = True


@atexit.register
def _leave() -> None:
    kind = getattr(sys, "last_type", None)
    if not _is_broken or kind is None or issubclass(kind, (SystemExit, KeyboardInterrupt)):
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or gone
            stream.flush()
    os._exit(_EXIT_CODE)
