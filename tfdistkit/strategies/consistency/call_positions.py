"""Checks that all ranks are in the same call of `fit`, `evaluate` or `predict`, and in the same epoch of it.

A rank that stops alone (`model.stop_training` there only, an exception that it catches) and goes on with another call
would join a collective of its peers' call: unrelated tensors would be summed, or all ranks would hang. So the first
thing that the ranks exchange when a call or an epoch begins is their position.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

import numpy as np

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency.row_exchange import table

# Bytes of a position: the same for all, so that any two can be exchanged.
_BYTES = 64

# By strategy: a rank can be in several groups of ranks, each of which takes part in some of its calls.
_calls: weakref.WeakKeyDictionary[Any, collections.Counter[tuple[str, str]]] = weakref.WeakKeyDictionary()
_here = "no call yet"


class Position:
    """The position of this process: its call, the number of that call, and the epoch.

    Args:
        strategy: The strategy, whose calls are counted.
        call: The method that reads data, such as `fit`.
        where: The part of the call, before its first epoch or after the last one.
    """

    def __init__(self, strategy: Any, call: str, where: str = "at its start"):
        self._counted = _calls.setdefault(strategy, collections.Counter())
        self._counted[call, where] += 1
        self._call, self._number, self._where, self._epoch = call, self._counted[call, where], where, 0

    def __str__(self) -> str:
        where = f"epoch {self._epoch} of it" if self._epoch else self._where
        return f"`{self._call}` number {self._number}, {where}"

    def next_epoch(self) -> Position:
        """Begins the next epoch."""
        self._epoch += 1
        return self

    def row(self) -> np.ndarray:
        """Returns the position as numbers, for an exchange between the ranks."""
        global _here
        _here = str(self)
        return np.frombuffer(_here.encode()[:_BYTES].ljust(_BYTES), np.int64)

    def require_equal(self, rows: np.ndarray) -> None:
        """Compares the positions of all ranks.

        Args:
            rows: The result of `row` on each rank.

        Raises:
            UnsupportedError: on all ranks, if they differ. Ranks that catch it can go on together.
        """
        if (rows == rows[0]).all():
            return
        self._counted.clear()
        positions = [row.tobytes().decode(errors="replace").strip() for row in rows]
        raise UnsupportedError(
            explain(
                "All ranks must be in the same call and epoch, or their collectives would mix unrelated tensors.",
                received="; ".join(f"rank {rank}: {where}" for rank, where in enumerate(positions)),
                expected="the same calls of fit, evaluate and predict on every rank, in the same order",
                do="Find what only one rank does: `model.stop_training = True` (use "
                "tfdistkit.callbacks.StopTogether), an exception that it catches, a call under `if rank == 0:`.",
            )
        )


def fit_together(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `fit`, and ends it on all ranks at once: the lines after it may load what callbacks of the chief write.

    Args:
        original: Keras's `fit`.
        model: The model.
        args: The other arguments of `fit`.
        kwargs: As `args`.

    Returns:
        The result of `fit`.

    Raises:
        UnsupportedError: on all ranks, if another one is in another call, or in an epoch.
    """
    history, strategy = original(model, *args, **kwargs), model.distribute_strategy
    if private_api.is_ours(strategy) and strategy.num_replicas_in_sync > len(strategy.extended.worker_devices):
        position = Position(strategy, "fit", "at its end")
        position.require_equal(table(strategy, position.row()))
    return history


def here() -> str:
    """Returns the last position of this process, as text."""
    return _here
