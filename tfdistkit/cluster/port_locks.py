"""Ports that processes of this machine have chosen, but nobody listens on yet.

A job's ports are chosen seconds before its workers listen on them. Of many jobs that start together some chose the
same ones. So who chooses a port locks a byte of a file that all have in common, for as long as it lives: the kernel
takes such locks back however a process ends.
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
    """Locks a port against other processes; a second time in one process is the same lock.

    Args:
        port: The TCP port.

    Returns:
        Whether this process has the lock. True where the file cannot be used: then nobody knows of the others.
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
    """Gives a port back.

    Args:
        port: The TCP port.
    """
    if _file is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(_file, fcntl.LOCK_UN, 1, port)


def _open() -> int | None:
    """Opens the file once: to close it would give all locks of this process back."""
    global _file, _is_open
    if not _is_open:
        _is_open = True
        for flags in (0, os.O_CREAT | os.O_EXCL, 0):  # it may have been made meanwhile
            try:
                _file = os.open(_PATH, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
            except OSError:
                continue
            if not stat.S_ISREG(os.fstat(_file).st_mode):
                os.close(_file)
                _file = None
            elif flags:
                os.fchmod(_file, 0o666)  # for other users, too: it holds nothing
            break
    return _file
