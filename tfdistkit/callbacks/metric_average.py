"""`MetricAverage`: numbers in the logs that each rank has measured for itself."""

from __future__ import annotations

import hashlib
import numbers
from typing import Any

import keras
import numpy as np

from tfdistkit.callbacks.process_group import Ranks, ranks_of, tell_once

_MOST_NAME_BYTES = 2**16


class MetricAverage(keras.callbacks.Callback):
    """Averages what differs between the ranks in the logs of an epoch.

    Under a strategy of tfdistkit the loss and the metrics of an epoch are those of all ranks together
    already, exactly, and averaging them again would change nothing: this callback finds them equal, leaves
    them as they are, and says so in the log. What can differ is what callbacks add on each rank, such as
    rows per second: after this one it is the mean over the ranks, the same on all of them.

    It must come after the callbacks that add to the logs, and before those that decide by them or write
    them down (`EarlyStopping`, `ReduceLROnPlateau`, `ChiefCheckpoint`, `CSVLogger`). Every rank must have
    it; it costs one or two small collectives an epoch. A number that not all ranks have in their logs stays
    as it is. In a single process there is nothing to average with, and the log says so.

    Example:
        ```python
        model.fit(dataset, callbacks=[MyTimer(), tfdistkit.callbacks.MetricAverage(), keras.callbacks.CSVLogger(...)])
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks: Ranks | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the other ranks."""
        self._ranks = ranks_of(self.model)
        if self._ranks.alone:
            tell_once("MetricAverage has nothing to do: this process trains alone.")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages, in place, for the callbacks that come later."""
        if logs is None or self._ranks is None or self._ranks.alone:
            return
        names = _names_on_all(self._ranks, sorted(k for k, v in logs.items() if _is_number(v)))
        everyone = self._ranks.gather(np.array([float(logs[name]) for name in names], np.float64))
        differ = (everyone.view(np.int64) != everyone.view(np.int64)[0]).any(0)
        for i, name in enumerate(names):
            if differ[i]:
                logs[name] = float(everyone[:, i].mean())
        if not differ.any() and self._ranks.rank == 0:
            tell_once("MetricAverage has nothing to do: the logs agree on all ranks, as those of Keras's metrics do.")


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return False
    return isinstance(value, numbers.Real) or (getattr(value, "shape", None) == () and hasattr(value, "__float__"))


def _names_on_all(ranks: Ranks, names: list[str]) -> list[str]:
    """Returns those of the names that every rank has."""
    text = "\n".join(names).encode()[:_MOST_NAME_BYTES]
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    everyone = ranks.gather(np.array([digest, len(text)], np.int64))
    if (everyone[:, 0] == digest).all():
        return names
    row: np.ndarray = np.zeros(-(-int(everyone[:, 1].max()) // 8) * 8, np.uint8)
    row[: len(text)] = np.frombuffer(text, np.uint8)
    texts = [bytes(r.view(np.uint8)).rstrip(b"\0").decode(errors="ignore") for r in ranks.gather(row.view(np.int64))]
    return sorted(set.intersection(*(set(one.split("\n")) for one in texts)) - {""})
