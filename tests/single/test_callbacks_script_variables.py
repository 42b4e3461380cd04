"""`BackupAndResume`: variables of the script that functions of callbacks change."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import pathlib
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from interrupted_runs import Broken, arrays, light

from tfdistkit.callbacks import BackupAndResume
from tfdistkit.callbacks.backup.of_callbacks.script_variables import script_variables

pytestmark = pytest.mark.tensorflow

LOSSES: list[float] = []
TABLE: dict[str, Any] = {"best": 9.9, "seen": []}
STEPS = 0


class Shared:
    """What a script keeps such things in."""

    steps = 0
    losses: list[float] = []

    def __init__(self) -> None:
        self.last = -1
        self.counts = collections.Counter[int]()

    def log(self, batch: int, logs: Any) -> None:
        self.last = batch
        self.counts[batch] += 1


SHARED = Shared()


def note(loss: float) -> None:
    """Is called by callbacks."""
    global STEPS, LAST
    STEPS += 1
    LAST = loss
    LOSSES.append(loss)
    TABLE["best"] = min(TABLE["best"], loss)
    TABLE["seen"].append(STEPS)


def in_globals() -> tuple[Any, Callable[[], Any]]:
    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            note(logs["loss"])

        def on_train_end(self, logs: Any = None) -> None:
            print(LOSSES, TABLE, STEPS)  # A function that only reads them changes nothing.

    return Own(), lambda: (LOSSES, TABLE, STEPS, LAST)  # type: ignore[name-defined]


def in_a_closure() -> tuple[Any, Callable[[], Any]]:
    steps, best, last = 0, None, collections.deque(maxlen=3)
    counts: Any = collections.defaultdict(list)
    table = np.zeros(5)

    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal steps, best
            steps += 1
            best = logs["loss"] if best is None else min(best, logs["loss"])
            last.append(batch)
            counts[batch % 2].append(logs["loss"])
            table[batch % 5] += 1

    return Own(), lambda: (steps, best, list(last), dict(counts), table.tolist())


def in_objects() -> tuple[Any, Callable[[], Any]]:
    class Own(keras.callbacks.Callback):
        total, best = 0, 9.9

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            Shared.steps += 1
            SHARED.last = batch
            SHARED.losses.append(logs["loss"])
            type(self).total += 1
            Own.best = min(Own.best, logs["loss"])

    return Own(), lambda: (Shared.steps, Shared.losses, SHARED.last, Own.total, Own.best)


def in_functions() -> tuple[Any, Callable[[], Any]]:
    losses: list[float] = []
    count = 0

    def log(batch: int, logs: Any) -> None:
        nonlocal count
        count += 1
        losses.append(logs["loss"])

    own = keras.callbacks.LambdaCallback(on_train_batch_end=log)
    return own, lambda: (losses, count)


def in_a_bound_method() -> tuple[Any, Callable[[], Any]]:
    shared = Shared()
    own = keras.callbacks.LambdaCallback(on_train_batch_end=shared.log)
    return own, lambda: (shared.last, dict(shared.counts))


def in_a_partial_function() -> tuple[Any, Callable[[], Any]]:
    seen: list[int] = []

    def log(word: str, batch: int, logs: Any) -> None:
        seen.append(batch)

    own = keras.callbacks.LambdaCallback(on_train_batch_end=functools.partial(log, "word"))
    return own, lambda: seen


class Trainer:
    """Holds its trackers, and makes the callback."""

    best = 9.9

    def __init__(self) -> None:
        self.shared, self.by_name, self.steps = Shared(), {"a": Shared()}, 0

    def after(self, batch: int) -> None:
        self.steps += 1
        self.shared.log(batch, None)
        self.by_name["a"].log(batch, None)

    @property
    def half(self) -> float:
        return self.steps / 2

    @half.setter
    def half(self, value: float) -> None:
        self.best = value


def in_methods() -> tuple[Any, Callable[[], Any]]:
    trainer, other, named = Trainer(), Trainer(), {"x": Shared()}

    class Own(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.shared = Shared()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            trainer.after(batch)
            other.after(batch + 1)
            other.half = trainer.half
            named["x"].log(batch, None)
            self.shared.log(batch, None)
            SHARED.log(batch, None)

    own = Own()
    trackers = [trainer.shared, trainer.by_name["a"], other.shared, named["x"], own.shared]
    return own, lambda: (trainer.steps, other.steps, other.best, [vars(one) for one in trackers], vars(SHARED))


def in_arguments() -> tuple[Any, Callable[[], Any]]:
    first: list[int] = []
    second: list[int] = []
    third = types.SimpleNamespace(steps=0, seen=[])

    def log(seen: list[int], batch: int, logs: Any, other: list[int] = second) -> None:
        seen.append(batch)
        other.append(-batch)
        log.steps += 1  # type: ignore[attr-defined]
        third.steps += 1
        third.seen.append(batch)

    log.steps = 0  # type: ignore[attr-defined]
    own = keras.callbacks.LambdaCallback(on_train_batch_end=functools.partial(log, first))
    return own, lambda: (first, second, log.steps, vars(third))  # type: ignore[attr-defined]


PLACES = [
    in_methods,
    in_arguments,
    in_globals,
    in_a_closure,
    in_objects,
    in_functions,
    in_a_bound_method,
    in_a_partial_function,
]


class Breaks(keras.callbacks.Callback):
    """Ends a training in a step; other callbacks run before."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations == self.at:
            raise Broken


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[Callable[[], None]]:
    def begin() -> None:
        globals().update(STEPS=0, SHARED=Shared())
        globals().pop("LAST", None)
        LOSSES.clear()
        TABLE.update(best=9.9, seen=[])
        Shared.steps = 0
        Shared.losses.clear()

    begin()
    yield begin
    begin()


def train(folder: pathlib.Path, make: Callable[[], Any], break_at: int = 0, data: Any = None) -> Any:
    """Trains 12 steps; may end in one. Returns what the callback has changed."""
    own, read = make()
    keras.utils.set_random_seed(1)
    x, y = arrays()
    callbacks = [own, Breaks(break_at), BackupAndResume(folder, save_freq=1)]
    light().fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    return read()


@pytest.mark.parametrize("make", PLACES)
def test_they_are_restored(
    tmp_path: pathlib.Path, as_in_a_new_process: Callable[[], None], make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = repr(train(tmp_path / "undisturbed", make))
    as_in_a_new_process()
    with pytest.raises(Broken):
        train(tmp_path / "folder", make, 8)
    as_in_a_new_process()
    with caplog.at_level(logging.WARNING):
        assert repr(train(tmp_path / "folder", make)) == expected
    assert "state of a callback" not in caplog.text


def test_what_is_only_read_is_not_restored_but_named(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be of the data, which come to their place by themselves."""
    generator, seen = random.Random(1), itertools.count()
    state = {"steps": 0}

    class Own(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            print(state["steps"], generator.random(), next(seen))

    own = Own()
    names = {name.rpartition(": ")[2]: one.is_state for name, one in script_variables(own).items()}
    assert names.items() >= {"generator": False, "seen": False, "state": False}.items()
    with caplog.at_level(logging.WARNING):
        keras.utils.set_random_seed(1)
        x, y = arrays()
        light().fit(x, y, batch_size=4, verbose=0, callbacks=[own, BackupAndResume(tmp_path, save_freq=2)])
    assert "on_train_batch_begin: generator` of Own" in caplog.text


def test_data_and_libraries_are_none(tmp_path: pathlib.Path) -> None:
    data = keras.utils.PyDataset()
    model = light()

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            data.workers += 1
            model.own_number = epoch
            np.core = None
            logging.raiseExceptions = True
            LOSSES.append(len(LOSSES))

    names = {name.rpartition(": ")[2] for name in script_variables(Own())}
    assert {"LOSSES", "data", "model"} <= names and not any("." in name for name in names)
