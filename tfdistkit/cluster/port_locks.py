"""Locks ports between their choice and the moment when a server listens on them.

A launcher chooses the ports of a job seconds before its workers listen there, so jobs that start together could choose
the same ones. The process that chooses a port locks one byte of a shared file until it exits: the kernel releases such
locks however a process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

# The same for all users and jobs, whatever TMPDIR says.
_PATH = "/tmp/tfdistkit.ports"

_file: int | None = None
_is_open = False


def lock(port: int) -> bool:
    """Locks a port against other processes; a second call in one process keeps the same lock.

    Args:
        port: The TCP port.

    Returns:
        Whether this process has the lock. True if the file cannot be used: then ports are not locked.
    """
    file = _open()
    if file is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def unlock(port: int) -> None:
    """Unlocks a port.

    Args:
        port: The TCP port.
    """
    if _file is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(_file, fcntl.LOCK_UN, 1, port)


def _open() -> int | None:
    """Opens the file once: closing it would release all locks of this process."""
    global _file, _is_open
    if not _is_open:
        _is_open = True
        for flags in (0, os.O_CREAT | os.O_EXCL, 0):  # another process may create it in between
            try:
                _file = os.open(_PATH, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
            except OSError:
                continue
            if not stat.S_ISREG(os.fstat(_file).st_mode):
                os.close(_file)
                _file = None
            elif flags:
                os.fchmod(_file, 0o666)  # for other users too: it has no content
            break
    return _file
