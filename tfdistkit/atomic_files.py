"""Writes files atomically: a reader sees the complete file or none, even if the writer is killed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator

# Distinguishes this process from an earlier one with the same pid (containers reuse pids).
_TOKEN = secrets.token_hex(4)
_LEFTOVER = re.compile(r"\.tfdistkit-(?P<pid>\d+)-(?P<token>[0-9a-f]+)-[^@]*@(?P<host>.*)\.partial")
# A writer on another host cannot be checked; no checkpoint takes a day to write.
_FOREIGN_LEFTOVER_AGE_S = 24 * 3600.0


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Yields a path to write to, and renames the file to `path` when the body ends.

    The file is written in a hidden folder beside `path` (`.tfdistkit-<pid>-...@<host>.partial`), synced to disk,
    and renamed. A killed writer leaves that folder; the next writer in the same folder removes it.

    Args:
        path: The final name. Its folder must exist. A link is followed; an existing file is replaced.

    Yields:
        The path to write to, with the same file name.
    """
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    _remove_leftovers(folder)
    prefix = f".tfdistkit-{os.getpid()}-{_TOKEN}-"
    scratch = tempfile.mkdtemp(dir=folder, prefix=prefix, suffix=f"@{socket.gethostname()}.partial")
    try:
        partial = os.path.join(scratch, name)
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sync(path: str | os.PathLike[str]) -> None:
    """Syncs a file or folder to disk: else a power cut after a rename could leave an empty file.

    Args:
        path: The file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: str) -> None:
    for entry in os.scandir(folder):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is not None and _is_dead(match, entry):
            shutil.rmtree(entry.path, ignore_errors=True)


def _is_dead(writer: re.Match[str], entry: os.DirEntry[str]) -> bool:
    if writer["host"] != socket.gethostname():
        try:
            return time.time() - entry.stat().st_mtime > _FOREIGN_LEFTOVER_AGE_S
        except FileNotFoundError:
            return False
    pid = int(writer["pid"])
    if pid == os.getpid():
        return writer["token"] != _TOKEN
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is alive, and belongs to another user
    return False
