"""Folders and files that nobody else on the machine may read: logs, arguments and variables of a job can hold secrets.

Whatever the umask. Symbolic links are not followed: in a folder that others can write to, they lead anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER, _FILE = 0o700, 0o600


def make_folder(path: Path) -> None:
    """Makes a folder, and those around it that are missing; one that is there stays as it is.

    Args:
        path: The folder.

    Raises:
        OSError: if it cannot be made, or is a symbolic link.
    """
    if path.is_symlink():
        raise FileExistsError(f"{path} is a symbolic link")
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent)
    try:
        os.mkdir(path, _FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        os.chmod(path, _FOLDER)


def open_file(path: Path, flags: int = os.O_TRUNC) -> int:
    """Opens a file for writing, and returns its descriptor.

    Args:
        path: The file; it is made if need be.
        flags: Besides those for writing and making it.

    Raises:
        OSError: if it cannot be opened, or is a symbolic link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, _FILE)
    try:
        os.fchmod(descriptor, _FILE)
    except OSError:
        pass  # somebody else's: they let us write there
    return descriptor


def write_file(path: Path, data: bytes) -> None:
    """Writes a file.

    Args:
        path: The file.
        data: What it holds from now on.

    Raises:
        OSError: if it cannot be written, or is a symbolic link.
    """
    with open(open_file(path), "wb") as file:
        file.write(data)
