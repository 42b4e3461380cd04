"""Reads `.npz` and `.npy` files for `tfdistkit data write`."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.errors import OptionError, explain

Columns = tuple[tuple[str, str, tuple[int, ...]], ...]

_NPY, _ZIP, _PICKLE = b"\x93NUMPY", b"PK", b"\x80"
_SAVE_AGAIN = "Save the arrays again (np.savez), or copy the file again."
# NumPy and zipfile raise these for damaged files, and for unknown compression or encryption.
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Table:
    """Rows of named columns.

    Args:
        columns: See `WrittenIndex`.
        count: The number of rows.
        rows: Reads the rows in order, each as values by name.
        notes: Notes for the user, one line each.
    """

    columns: Columns
    count: int
    rows: Callable[[], Iterator[dict[str, np.ndarray]]]
    notes: tuple[str, ...] = ()


def read_arrays(path: str) -> Table:
    """Loads the arrays of a file.

    Args:
        path: A `.npz` or `.npy` file.

    Raises:
        OptionError: if it is damaged, has a dtype that TensorFlow lacks, or arrays of different lengths.
    """
    arrays = _load(path)
    scalars = [name for name, array in arrays.items() if not array.ndim]
    counts = {name: len(array) for name, array in arrays.items() if array.ndim}
    if scalars or len(set(counts.values())) != 1:
        rows = ", ".join(f"{name or 'array'}: {counts.get(name, 'a scalar')}" for name in arrays) or "no arrays"
        raise OptionError(
            explain(
                "The arrays of a file must all have the same number of rows.",
                received=f"{rows} in {path}",
                do="Save arrays of other lengths in another file.",
            )
        )
    columns = tuple((name, _dtype_name(name, array, path), tuple(array.shape[1:])) for name, array in arrays.items())
    count = next(iter(counts.values()))

    def read() -> Iterator[dict[str, np.ndarray]]:
        return ({name: np.asarray(array[i]) for name, array in arrays.items()} for i in range(count))

    return Table(columns, count, read)


def _load(path: str) -> dict[str, np.ndarray]:
    begins = _first_bytes(path)
    if begins.startswith(_PICKLE):
        raise _unreadable(path, "it is a pickle", "Save arrays of numbers or strings: np.savez(file, x=x, y=y).")
    if not begins.startswith((_NPY, _ZIP)):
        raise _unreadable(path, "it is empty" if not begins else "it is neither .npy nor .npz", _SAVE_AGAIN)
    name = ""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        arrays: dict[str, Any] = {}
        with loaded:
            for name in loaded.files:
                arrays[name] = loaded[name]
                if not isinstance(arrays[name], np.ndarray):
                    raise ValueError("it is not an array")
        return arrays
    except _UNREADABLE as error:
        of = f"array {name!r}: " if name else ""
        if "allow_pickle" in str(error):
            advice = "Save numbers or strings instead: np.array(values, dtype)."
            raise _unreadable(path, f"{of}it holds Python objects, which are pickled", advice) from None
        cut = " (an .npz that was cut off, or is damaged)" if isinstance(error, zipfile.BadZipFile) else ""
        raise _unreadable(path, f"{of}{str(error).rstrip('.')}{cut}", _SAVE_AGAIN) from error


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(len(_NPY))
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error), None) from None


def _unreadable(path: str, why: str, do: str | None) -> OptionError:
    what = f"The arrays cannot be read: {why}."
    return OptionError(explain(what, received=path, expected="a file written by np.save or np.savez", do=do))


def _dtype_name(name: str, array: np.ndarray, path: str) -> str:
    if array.dtype.kind in "SU":
        return "string"
    try:
        return str(tf.as_dtype(array.dtype.name).name)
    except TypeError:
        raise OptionError(
            explain(
                "Each array must have a dtype that TensorFlow has.",
                received=f"{array.dtype} of array {name!r} in {path}",
                do="Convert it with `array.astype` and save it again.",
            )
        ) from None
