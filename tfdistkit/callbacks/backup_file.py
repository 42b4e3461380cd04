"""One file with all that a training needs to go on: JSON and arrays in a zip archive, which has a checksum of each."""

from __future__ import annotations

import io
import json
import os
import zipfile
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.atomic import whole_file
from tfdistkit.callbacks.plain_data import decode, encode
from tfdistkit.errors import UnsupportedError, explain

_FORM = 1
_STATE = "state.json"


def write_backup(path: str, content: dict[str, Any]) -> None:
    """Writes plain data into a file that is there whole or not at all.

    Args:
        path: The file; its folder is made if it is missing.
        content: The data.

    Raises:
        OSError: if it cannot be written; what was there before stays.
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
    except OSError as error:
        message = explain(
            "The backup could not be written; the one that was there before is unchanged.",
            received=f"{type(error).__name__}: {error}, for {os.path.abspath(path)!r}",
            expected="a folder that the chief may write to, with enough free space",
        )
        raise (OSError(message) if error.errno is None else OSError(error.errno, message)) from error


def read_backup(data: bytes, path: str) -> dict[str, Any]:
    """Returns what `write_backup` was given.

    Args:
        data: The bytes of the file.
        path: Its name, for errors.

    Raises:
        UnsupportedError: if the file is damaged, or of another version.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            head = json.loads(file.read(_STATE))
            arrays = [_array(file.read(str(i)), *spec) for i, spec in enumerate(head["arrays"])]
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError) as error:
        raise UnsupportedError(
            explain(
                "The backup is damaged.",
                received=f"{os.path.abspath(path)!r}, {len(data)} bytes: {error}",
                do="Remove it to train from the beginning, or put a copy of it there.",
            )
        ) from error
    if head["form"] != _FORM:
        raise UnsupportedError(explain("The backup is of another version of tfdistkit.", received=os.path.abspath(path),
                                       do="Go on with the version that wrote it, or remove it."))
    content: dict[str, Any] = decode(head["content"], arrays)
    return content


def _array(data: bytes, dtype: str, shape: list[int]) -> np.ndarray:
    # TensorFlow knows bfloat16 and the float8s, which NumPy does not.
    kind = np.dtype(dtype) if dtype in np.sctypeDict else np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    return np.frombuffer(data, kind).reshape(shape)
