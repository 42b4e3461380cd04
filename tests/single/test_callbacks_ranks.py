"""`BroadcastVariables`, `MetricAverage` and `StopTogether` in one process: they change nothing, and warn once."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest

from tfdistkit.callbacks import BroadcastVariables, MetricAverage, StopTogether
from tfdistkit.callbacks.process_group import Ranks, warn_once
from tfdistkit.errors import OptionError

pytestmark = pytest.mark.tensorflow


class Logs(keras.callbacks.Callback):
    """Records its calls; may stop."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.logs: dict[str, Any] = {}
        self.stop_at = stop_at

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(f"begin of {self.params['epochs']}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"batch {batch}")
        if batch == self.stop_at:
            self.model.stop_training = True

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append("test")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs = dict(logs)
        self.calls.append(f"epoch {epoch}")

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("end")


def fit(*callbacks: keras.callbacks.Callback) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    data = (x, x[:, :1])
    model.fit(*data, batch_size=8, epochs=2, verbose=0, validation_data=data, callbacks=list(callbacks))
    return model.get_weights()


@pytest.mark.parametrize("make", [BroadcastVariables, lambda: BroadcastVariables(3), MetricAverage, StopTogether])
def test_one_process_changes_nothing_and_warns_once(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tfdistkit"):
        found = fit(make(), make())
    lines = [record.message for record in caplog.records if record.name.startswith("tfdistkit")]
    assert len(lines) == 1 and "has nothing to do: there is one process" in lines[0]
    for one, other in zip(found, fit(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_metric_average_of_one_process_keeps_the_logs() -> None:
    seen, expected = Logs(), Logs()
    fit(MetricAverage(), seen)
    fit(expected)
    assert seen.logs == expected.logs


def test_stop_together_calls_wrapped_callbacks_as_keras_does() -> None:
    bare, first, second = Logs(), Logs(), Logs()
    fit(bare)
    fit(StopTogether(first, second, check_every="epoch"))
    assert first.calls == second.calls == bare.calls
    assert bare.calls[:2] == ["begin of 2", "batch 0"] and "test" in bare.calls


def test_stop_together_of_one_process_stops_as_keras_does() -> None:
    bare, wrapped = Logs(stop_at=1), Logs(stop_at=1)
    fit(bare)
    fit(StopTogether(wrapped, check_every=3))
    assert wrapped.calls == bare.calls
    assert bare.calls == ["begin of 2", "batch 0", "batch 1", "test", "epoch 0", "end"]


def test_invalid_arguments_are_errors() -> None:
    for root in (-1, "0", 1.0, True):
        with pytest.raises(OptionError, match="`root_rank` must be an integer >= 0"):
            BroadcastVariables(root)  # type: ignore[arg-type]
    for every in (0, -1, "batch", 1.5, True):
        with pytest.raises(OptionError, match="`check_every` must be"):
            StopTogether(check_every=every)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="without a list"):
        StopTogether([Logs()])  # type: ignore[arg-type]


def test_ranks_of_one_process() -> None:
    import tensorflow as tf

    ranks = Ranks(tf.distribute.get_strategy())
    assert ranks.is_single and ranks.rank == 0 and ranks.size == 1
    assert ranks.any(True) and not ranks.any(False)
    np.testing.assert_array_equal(ranks.gather(np.array([1.5, -0.0, np.nan])), [[1.5, -0.0, np.nan]])
