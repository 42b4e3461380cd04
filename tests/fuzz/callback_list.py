"""The callbacks of programs, and the one that interrupts a `fit`."""

from __future__ import annotations

from typing import Any

import keras


class Interrupted(Exception):
    """The exception that interrupts a `fit`."""


class InterruptAfter(keras.callbacks.Callback):
    """Raises after a number of steps, counted over all epochs."""

    def __init__(self, steps: int):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left <= 0:
            raise Interrupted


class LogsOfBatches(keras.callbacks.Callback):
    """Records the logs after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append({name: float(value) for name, value in (logs or {}).items()})

    on_test_batch_end = on_train_batch_end


class RateByBatch(keras.callbacks.Callback):
    """Changes the learning rate in the middle of an epoch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.optimizer.learning_rate = 0.02


def _monitored(monitor: str) -> dict[str, Any]:
    return {
        "rate": keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        "stop": keras.callbacks.EarlyStopping(monitor=monitor, mode="min", min_delta=0.05, restore_best_weights=True),
        "plateau": keras.callbacks.ReduceLROnPlateau(
            monitor=monitor, mode="min", factor=0.3, patience=1, min_delta=0.05, cooldown=0
        ),
        "nan": keras.callbacks.TerminateOnNaN(),
        "rate_by_batch": RateByBatch(),
        "batch_logs": LogsOfBatches(),
    }


CALLBACKS = ("rate", "stop", "plateau", "nan", "rate_by_batch", "batch_logs")


def make_callbacks(names: tuple[str, ...], monitor: str) -> list[Any]:
    """Makes callbacks of these names, in their order.

    Args:
        names: Out of `CALLBACKS`.
        monitor: The log that those that decide by a log look at.
    """
    made = _monitored(monitor)
    return [made[name] for name in names]
