"""Are all ranks in the same call of `fit`, `evaluate` or `predict`, and in the same epoch of it?

A rank that stops alone (`model.stop_training` there only, an exception that it catches) and goes on with another call
meets the others in a collective of theirs: their numbers would be mixed, or all would wait. So each rank writes down
where it is when a call or an epoch begins, as the first thing that the ranks exchange there.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

import numpy as np

from tfdistkit.errors import UnsupportedError, explain

# What a position takes, in bytes: the same everywhere, so that any two can be exchanged.
_BYTES = 64

# By strategy: a rank can be in several groups of ranks, whose other ranks saw less of it.
_calls: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()
_here = "no call yet"


class Position:
    """Where this process is.

    Args:
        strategy: The strategy, whose calls are counted.
        call: What reads data, such as `fit`.
    """

    def __init__(self, strategy: Any, call: str):
        self._counted = _calls.setdefault(strategy, collections.Counter())
        self._counted[call] += 1
        self._call, self._number, self._epoch = call, self._counted[call], 0

    def __str__(self) -> str:
        where = f"epoch {self._epoch} of it" if self._epoch else "at its begin"
        return f"`{self._call}` number {self._number}, {where}"

    def next_epoch(self) -> Position:
        """Counts an epoch."""
        self._epoch += 1
        return self

    def row(self) -> np.ndarray:
        """Returns it as numbers, for an exchange between the ranks."""
        global _here
        _here = str(self)
        return np.frombuffer(_here.encode()[:_BYTES].ljust(_BYTES), np.int64)

    def require_equal(self, rows: np.ndarray) -> None:
        """Compares the positions of all ranks.

        Args:
            rows: What `row` returned on each.

        Raises:
            UnsupportedError: on all ranks, if they differ. A rank that catches it can go on with the others.
        """
        if (rows == rows[0]).all():
            return
        self._counted.clear()
        told = [row.tobytes().decode(errors="replace").strip() for row in rows]
        raise UnsupportedError(
            explain(
                "The ranks are in different calls or epochs, so they would mix what does not belong together.",
                received="; ".join(f"rank {rank}: {where}" for rank, where in enumerate(told)),
                expected="the same calls of fit, evaluate and predict on every rank, in the same order",
                do="Find what one rank alone does: `model.stop_training = True` (use "
                "tfdistkit.callbacks.StopTogether), an exception that it catches, a call under `if rank == 0:`.",
            )
        )


def here() -> str:
    """Returns where this process began to compute last, as text."""
    return _here
