"""`BackupAndResume`: containers of callbacks that the script holds, too, or that are attributes of their class."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from interrupted_runs import Broken, arrays, light

from tfdistkit.callbacks import BackupAndResume

pytestmark = pytest.mark.tensorflow


def train(folder: pathlib.Path, break_at: int) -> dict[str, Any]:
    """Trains 12 steps with callbacks that write into what the script made; may end in one."""
    losses: list[float] = []
    last: Any = collections.deque(maxlen=3)
    counts, table = {"steps": 0}, np.zeros(4)

    class Writes(keras.callbacks.Callback):
        epochs: list[int] = []

        def __init__(self) -> None:
            super().__init__()
            self.losses, self.last, self.counts, self.table = losses, last, counts, table
            self.nested = {"losses": losses}

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.losses.append(logs["loss"])
            self.last.append(batch)
            self.counts["steps"] += 1
            self.table[batch % 4] += 1
            if self.counts["steps"] == break_at:
                raise Broken

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs.append(epoch)

    keras.utils.set_random_seed(1)
    callback = Writes()
    x, y = arrays()
    callbacks = [callback, BackupAndResume(folder, save_freq=1)]
    light().fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    assert callback.nested["losses"] is callback.losses is losses
    return {"losses": losses, "last": list(last), **counts, "table": table.tolist(), "epochs": Writes.epochs}


def test_they_are_filled_with_what_the_backup_has(tmp_path: pathlib.Path) -> None:
    expected = train(tmp_path / "undisturbed", 0)
    assert expected["steps"] == len(expected["losses"]) == 12 and expected["epochs"] == [0, 1]
    with pytest.raises(Broken):
        train(tmp_path / "folder", 8)
    assert train(tmp_path / "folder", 0) == expected
