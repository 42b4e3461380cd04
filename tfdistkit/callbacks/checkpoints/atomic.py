"""Files that are there whole or not at all, whenever their writer dies."""

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

# Tells this process from an earlier one with the same number (in containers the numbers repeat).
_TOKEN = secrets.token_hex(4)
_LEFTOVER = re.compile(r"\.tfdistkit-(?P<pid>\d+)-(?P<token>[0-9a-f]+)-[^@]*@(?P<host>.*)\.partial")
# Whether a writer on another host lives cannot be seen; nobody writes on one checkpoint for a day.
_FOREIGN_LEFTOVER_AGE_S = 24 * 3600.0


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Lets the caller write a file that appears under its name when it is whole, and not before.

    It is written in a hidden folder beside `path` (`.tfdistkit-<pid>-...@<host>.partial`), brought to the
    disk, and renamed. A writer that is killed leaves that folder; the next one in the same place removes it.

    Args:
        path: The final name. Its folder must exist. A link is followed; a file there is replaced.

    Yields:
        The path to write to, with the same last part.
    """
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    _remove_leftovers(folder)
    prefix = f".tfdistkit-{os.getpid()}-{_TOKEN}-"
    scratch = tempfile.mkdtemp(dir=folder, prefix=prefix, suffix=f"@{socket.gethostname()}.partial")
    try:
        partial = os.path.join(scratch, name)
        yield partial
        _bring_to_disk(partial)
        os.replace(partial, path)
        _bring_to_disk(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _bring_to_disk(path: str) -> None:
    """Without it, a power cut after the rename could leave the name with nothing behind it."""
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
        pass  # it lives, and belongs to somebody else
    return False
