"""Creates folders and files that other users cannot read: logs, arguments and variables of a job can hold secrets.

Ignores the umask, and refuses symbolic links: in a folder that other users can write to, they may point anywhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tfdistkit.errors import OptionError, explain

_FOLDER, _FILE = 0o700, 0o600


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents; keeps an existing one unchanged.

    Args:
        path: The folder.

    Raises:
        OSError: if it cannot be created, or is a symbolic link.
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
    """Opens a file for writing, and returns the descriptor.

    Args:
        path: The file; created if missing.
        flags: Additional flags of `os.open`.

    Raises:
        OSError: if it cannot be opened, or is a symbolic link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, _FILE)
    try:
        os.fchmod(descriptor, _FILE)
    except OSError:
        pass  # owned by another user, who permits writing
    return descriptor


def write_file(path: Path, data: bytes) -> None:
    """Writes a file.

    Args:
        path: The file.
        data: The new content.

    Raises:
        OSError: if it cannot be written, or is a symbolic link.
    """
    with open(open_file(path), "wb") as file:
        file.write(data)


@contextlib.contextmanager
def writing_logs() -> Iterator[None]:
    """Turns an OSError in its body, which writes into a run folder, into one of an option.

    Raises:
        OptionError: (a ValueError) with the message of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise OptionError(
            explain("The folder for the logs cannot be used.", received=str(error), expected="a folder to write to")
        ) from error
