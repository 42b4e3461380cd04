"""`MetricAverage`: averages logs that each rank measures for itself."""

from __future__ import annotations

import hashlib
import numbers
from typing import Any

import keras
import numpy as np

from tfdistkit.callbacks.process_group import Ranks, ranks_of, warn_once

_MOST_NAME_BYTES = 2**16


class MetricAverage(keras.callbacks.Callback):
    """Averages the epoch logs that differ between the ranks.

    Under a tfdistkit strategy the loss and the metrics of an epoch already cover all ranks exactly, so this
    callback finds them equal, and leaves them unchanged. Logs that callbacks add on each rank, such as rows per
    second, can differ: this replaces them by their mean over the ranks, the same on all of them.

    Put it after the callbacks that add to the logs, and before those that read them (`EarlyStopping`,
    `ReduceLROnPlateau`, `ChiefCheckpoint`, `CSVLogger`). Every rank must have it; it costs one or two small
    collectives per epoch. A log that is missing on some rank stays unchanged. In a single process, or if all
    logs are equal, it logs once that it has nothing to do.

    Example:
        ```python
        model.fit(dataset, callbacks=[MyTimer(), tfdistkit.callbacks.MetricAverage(), keras.callbacks.CSVLogger(...)])
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks: Ranks | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the process group."""
        self._ranks = ranks_of(self.model)
        if self._ranks.is_single:
            warn_once("MetricAverage has nothing to do: there is one process.")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages the logs in place, for the callbacks after this one."""
        if logs is None or self._ranks is None or self._ranks.is_single:
            return
        names = _names_on_all(self._ranks, sorted(k for k, v in logs.items() if _is_number(v)))
        of_ranks = self._ranks.gather(np.array([float(logs[name]) for name in names], np.float64))
        differ = (of_ranks.view(np.int64) != of_ranks.view(np.int64)[0]).any(0)
        for i, name in enumerate(names):
            if differ[i]:
                logs[name] = float(of_ranks[:, i].mean())
        if not differ.any() and self._ranks.rank == 0:
            warn_once("MetricAverage has nothing to do: all logs are equal on all ranks, as Keras's metrics are.")


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return False
    return isinstance(value, numbers.Real) or (getattr(value, "shape", None) == () and hasattr(value, "__float__"))


def _names_on_all(ranks: Ranks, names: list[str]) -> list[str]:
    """Returns the names that every rank has."""
    text = "\n".join(names).encode()[:_MOST_NAME_BYTES]
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    of_ranks = ranks.gather(np.array([digest, len(text)], np.int64))
    if (of_ranks[:, 0] == digest).all():
        return names
    row: np.ndarray = np.zeros(-(-int(of_ranks[:, 1].max()) // 8) * 8, np.uint8)
    row[: len(text)] = np.frombuffer(text, np.uint8)
    texts = [bytes(r.view(np.uint8)).rstrip(b"\0").decode(errors="ignore") for r in ranks.gather(row.view(np.int64))]
    return sorted(set.intersection(*(set(one.split("\n")) for one in texts)) - {""})
