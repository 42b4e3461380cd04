"""Several arrays as one: what an operation reads and writes, without a copy that joins them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

# TensorFlow takes over an array without a copy if it begins at a multiple of this.
_ALIGNMENT = 64


class Pieces:
    """Arrays of one dtype, addressed by the position of an element among those of all.

    Args:
        arrays: C-contiguous arrays.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._flat = [array.reshape(-1) for array in arrays]
        self._ends = list(itertools.accumulate(flat.size for flat in self._flat))
        self.size = self._ends[-1] if self._ends else 0

    def read(self, first: int, last: int, target: np.ndarray) -> None:
        """Copies the elements from `first` to before `last` into an array."""
        for own, place in self._ranges(first, last):
            np.copyto(target[place], own)

    def write(self, first: int, last: int, source: np.ndarray) -> None:
        """Copies an array to the elements from `first` to before `last`."""
        for own, place in self._ranges(first, last):
            np.copyto(own, source[place])

    def add(self, first: int, last: int, one: np.ndarray, other: np.ndarray) -> None:
        """Writes the sum of two arrays to the elements from `first` to before `last`."""
        for own, place in self._ranges(first, last):
            np.add(one[place], other[place], out=own)

    def joined(self) -> bytes:
        """Returns the bytes of all arrays."""
        return b"".join(flat.tobytes() for flat in self._flat)

    def _ranges(self, first: int, last: int) -> Iterator[tuple[np.ndarray, slice]]:
        at = bisect.bisect_right(self._ends, first)
        position = first
        while position < last:
            begin = self._ends[at] - self._flat[at].size
            end = min(last, self._ends[at])
            yield self._flat[at][position - begin : end - begin], slice(position - first, end - first)
            position, at = end, at + 1


def empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns a new array that TensorFlow can take over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw: np.ndarray = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)
