"""Exits a process of a broken job without destructors.

When a coordinator exits, threads of TensorFlow still wait for a lost task, and sometimes crash during the teardown
(`Mutex corrupt`, SIGSEGV). The exit code and the last output would then hide the error.

Exit functions run in the reverse order of their registration, and only the last one can exit the process without
skipping one of the user's. So this module is imported early: by the worker, or else by the strategy.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys

# Python's exit code after an unhandled exception.
_EXIT_CODE = 1

_is_broken = False


def leave_at_once() -> None:
    """Makes this process exit without destructors after an unhandled exception; call it when tasks of the job are lost.

    `sys.exit` and Ctrl-C are left to Python, which knows the exit code.
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
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or None
            stream.flush()
    os._exit(_EXIT_CODE)
