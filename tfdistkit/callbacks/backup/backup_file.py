"""Reads and writes backup files: JSON and arrays in a zip archive, which has a checksum of each entry."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.atomic_files import whole_file
from tfdistkit.callbacks.backup.plain_data import decode, encode
from tfdistkit.errors import UnsupportedError, explain

_FORM = 1
_STATE = "state.json"
# The keys that every backup must have.
PARTS = {"data", "model", "callbacks", "logs", "stopped"}


def previous_of(path: str) -> str:
    """Returns the path of the previous backup."""
    return f"{path}.previous"


def write_backup(path: str, content: dict[str, Any], keep_previous: bool = True) -> None:
    """Writes plain data atomically into a file.

    Args:
        path: The file; its folder is created if it is missing.
        content: The data.
        keep_previous: Whether an existing file becomes the previous backup; if not, the previous backup stays.

    Raises:
        OSError: if it cannot be written; existing backups stay.
    """
    arrays: list[np.ndarray] = []
    coded = encode(content, arrays)
    specs = [[array.dtype.name, list(array.shape)] for array in arrays]
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with whole_file(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as file:
            file.writestr(_STATE, json.dumps({"form": _FORM, "content": coded, "arrays": specs}))
            for i, array in enumerate(arrays):
                with file.open(str(i), "w", force_zip64=True) as entry:
                    entry.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.close()
            if keep_previous:
                _keep_previous(path)
    except OSError as error:
        message = explain(
            "The backup could not be written; existing backups are unchanged.",
            received=f"{type(error).__name__}: {error}, for {os.path.abspath(path)!r}",
            expected="a folder that the chief may write to, with enough free space",
        )
        raise (OSError(message) if error.errno is None else OSError(error.errno, message)) from error


def read_backup(data: bytes, path: str) -> dict[str, Any]:
    """Returns the content that `write_backup` wrote.

    Args:
        data: The bytes of the file.
        path: Its name, for errors.

    Raises:
        UnsupportedError: if the file is damaged, or has the format of another version.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            head = json.loads(file.read(_STATE))
            form, content = head["form"], dict[str, Any]()
            if form == _FORM:
                arrays = [_array(file.read(str(i)), *spec) for i, spec in enumerate(head["arrays"])]
                content = decode(head["content"], arrays)
                if not PARTS <= set(content):
                    raise ValueError("it is not a backup of BackupAndResume")
    except Exception as error:  # Damaged bytes raise many kinds of exceptions.
        raise UnsupportedError(
            explain(
                "The backup is damaged.",
                received=f"{os.path.abspath(path)!r}, {len(data)} bytes: {error}",
                do="Remove it to train from the beginning, or restore a copy of it.",
            )
        ) from error
    if form != _FORM:
        raise UnsupportedError(
            explain(
                f"The backup must have format {_FORM}: another version of tfdistkit wrote it.",
                received=f"format {form!r} in {os.path.abspath(path)!r}",
                do="Resume with the version that wrote it, or remove it.",
            )
        )
    return content


def _keep_previous(path: str) -> None:
    """Links the existing backup to the name of the previous one; it also stays under its own name."""
    new = f"{previous_of(path)}.new"
    with contextlib.suppress(FileNotFoundError):
        os.remove(new)
    try:
        os.link(path, new)
    except FileNotFoundError:
        return
    except OSError:  # A file system without hard links.
        os.replace(path, previous_of(path))
        return
    os.replace(new, previous_of(path))
    with contextlib.suppress(FileNotFoundError):
        os.remove(new)  # `os.replace` does nothing if both names are links to one file.


def _array(data: bytes, dtype: str, shape: list[int]) -> np.ndarray:
    # NumPy lacks bfloat16 and float8; TensorFlow has them.
    kind = np.dtype(dtype) if dtype in np.sctypeDict else np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    return np.frombuffer(data, kind).reshape(shape)
