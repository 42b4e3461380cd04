"""`BackupAndResume` and the state of other callbacks: what is kept of it, and what is told."""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupted_runs import in_arrays, light, run

pytestmark = pytest.mark.tensorflow


class Meter:
    """An object of the user's that counts."""

    def __init__(self) -> None:
        self.steps = 0


class Keeping(keras.callbacks.Callback):
    """Keeps state in many kinds of containers, and in objects."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.last, self.seen = collections.deque(maxlen=3), set()
        self.counts, self.order = collections.defaultdict(list), collections.OrderedDict()
        self.random, self.average = np.random.default_rng(3), tf.zeros([2])
        self.python, self.old = random.Random(3), np.random.RandomState(3)
        self.meter, self.raw = Meter(), b""
        self.space, self.arguments = types.SimpleNamespace(steps=0), argparse.Namespace(steps=0)
        self.space_of_all, self.slot = self.space, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.raw += bytes([batch])
        self.space.steps += 1
        self.arguments.steps += 1
        self.slot += 1
        self.last.append(batch)
        self.seen.add(batch)
        self.counts[batch].append(self.random.random() + self.python.random() + self.old.rand())
        self.order[batch] = self.order.get(batch, 0) + 1
        self.average = self.average * 0.9 + batch
        self.meter.steps += 1


def test_containers_generators_and_tensors_of_callbacks(tmp_path: pathlib.Path, caplog: Any) -> None:
    kept: list[Keeping] = []

    def make() -> list[Any]:
        kept.append(Keeping())
        return [kept[-1]]

    run(light, in_arrays, make, None)
    run(light, in_arrays, make, tmp_path, 8)
    run(light, in_arrays, make, tmp_path)
    expected, _, found = kept
    for name in ("last", "seen", "counts", "order", "raw", "space", "arguments", "slot"):
        assert getattr(found, name) == getattr(expected, name) and type(getattr(found, name)) is type(
            getattr(expected, name)
        )
    np.testing.assert_array_equal(found.average, expected.average)
    assert found.random.random() == expected.random.random() and found.last.maxlen == 3
    assert found.meter.steps == expected.meter.steps == 18
    assert "changes in" not in caplog.text and found.space is found.space_of_all


def test_state_that_a_function_changes_is_told(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = keras.metrics.Sum()

    def count(batch: int, logs: Any = None) -> None:
        steps.update_state(1)

    run(light, in_arrays, lambda: [keras.callbacks.LambdaCallback(on_train_batch_end=count)], tmp_path)
    assert "count: steps` of LambdaCallback" in caplog.text
