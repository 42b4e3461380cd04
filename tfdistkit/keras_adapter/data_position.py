"""Tracks the position of a `fit` in its data, and resumes a `fit` in the middle of an epoch.

Resumed training must see the rest of the epoch, in the order of the interrupted run. So the order is repeated - with
the same seeds, and as many iterators over the data as before - and the batches that were trained on are read and
skipped. This requires nothing of the data but a repeatable order.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.data.batch_info import info_of
from tfdistkit.data.dataset_metadata import ONE_ORDER, has_mark
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import data_order, private_api
from tfdistkit.keras_adapter.data_order import Reads

_LOCAL = threading.local()
# For a model in a resumed epoch: the logs of its last step before the restart.
_LOGS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class DataState:
    """The position of a `fit` in its data, as plain data.

    Args:
        epoch: The epoch to resume, from 0.
        batch: Its first batch that was not trained on.
        first_epoch: The epoch in which the first run began.
        iterator: The number of iterators over the data before the one of this epoch.
        drawn: Batches of this iterator that belong to earlier epochs (with `steps_per_epoch`).
        num_batches: Batches per epoch as known to Keras; None for a worker's own shard.
        seed: The seed of the shuffle order of arrays.
        order: The seeds of the dataset's own shuffling.
        parts: The number of shards that the user made, one per replica; 0 if tfdistkit shards the data, or if the
            shards together have the order of one process.
        random_at_fit: The states of the global generators of Python and NumPy when `fit` was called.
        random_at_epoch: Their states when the epoch began.
        read: Batches read from each earlier iterator, if that determines the order of the next one.
        validations: The number of evaluations on `validation_steps` batches.
    """

    epoch: int
    batch: int
    first_epoch: int
    iterator: int
    drawn: int
    num_batches: int | None
    seed: int
    order: list[Any]
    parts: int
    random_at_fit: Any
    random_at_epoch: Any
    read: list[int] = field(default_factory=list)
    validations: int = 0


class FitData:
    """The training data of one `fit`: tracks its position, and starts at the position of an interrupted `fit`.

    Args:
        x: The argument of `fit`.
        first_epoch: Its `initial_epoch`.
        resumed: The position to start at; None for the beginning.
        same_order: Whether data without a repeatable order is an error.
        on_position: Called before the first step.
        accept_changes: Whether to train on data that differs from `resumed`, from the beginning of the epoch.
        validation_steps: The argument of `fit`.

    Raises:
        UnsupportedError: if the order of the data is not repeatable, or differs from `resumed`.
    """

    def __init__(
        self, x: Any, first_epoch: int, resumed: DataState | None, same_order: bool, on_position: Callable[[], None],
        accept_changes: bool = False, validation_steps: int | None = None,
    ):  # fmt: skip
        self.first_epoch = first_epoch if resumed is None else resumed.first_epoch
        self._order = data_order.order_of(x, same_order)
        self._is_dealt = isinstance(x, tf.data.Dataset) and has_mark(x, ONE_ORDER) and not data_order.shuffles(x)
        self._resumed, self._same_order, self._on_position = resumed, same_order, on_position
        self._x, self._reads_again = x, data_order.reads_again(x)
        self._read: list[int] = []
        self._accepts_changes, self.begins_anew = accept_changes, False
        self._iterator: Any = None
        self._validation_steps, self._validation = validation_steps, None
        self._validations, self._validations_before = 0, 0 if resumed is None else resumed.validations
        self._seed = None if resumed is None else resumed.seed
        self._made = self._drawn = self._in_use = self._drawn_before = self._next = 0
        if resumed is not None:
            if same_order and self._order != resumed.order:
                self._refuse(data_order.other_order(self._order, resumed.order))
            _set_random(resumed.random_at_fit)
        self._redeals = False
        self._random_at_fit = self._random_at_epoch = _get_random()

    @property
    def steps_done(self) -> int:
        """The number of steps of the epoch that have been yielded."""
        return self._next

    def state_in_epoch(self, epoch: int) -> DataState:
        """Returns the position within an epoch, after the steps that have been yielded."""
        return self._state(epoch, self._next, self._in_use, self._drawn_before, self._random_at_epoch)

    def state_after_epoch(self, epoch: int) -> DataState:
        """Returns the position at the end of an epoch."""
        goes_on = self._is_continued() and private_api.has_iterator(self._iterator)
        place = (self._made - 1, self._drawn) if goes_on else (self._made, 0)
        return self._state(epoch + 1, 0, *place, _get_random())

    def _state(self, epoch: int, batch: int, iterator: int, drawn: int, random_at_epoch: Any) -> DataState:
        num_batches = None if self._is_own_part() else private_api.num_batches_of(self._iterator)
        return DataState(
            epoch, batch, self.first_epoch, iterator, drawn, num_batches,
            int(self._seed or 0), self._order, self._parts(), self._random_at_fit, random_at_epoch,
            [*self._read, self._drawn][:iterator] if self._reads_again else [],
            self._validations_before + self._validations,
        )  # fmt: skip

    def require_unmoved(self, read: Any) -> None:
        """Raises an error if reading other data advances the order of the training data.

        Args:
            read: The other data.
        """
        if self._same_order:
            data_order.require_separate_order(self._x, read)

    def leave_random(self) -> None:
        """Leaves the global generators as training left them, if all epochs had ended before this `fit`."""
        if self._resumed is not None and not self.begins_anew:
            _set_random(self._resumed.random_at_epoch)

    def begin_epoch_anew(self) -> None:
        """Restarts the epoch: the data differs from the backup, so the rows that were seen are unknown."""
        self.begins_anew = True

    def _refuse(self, error: UnsupportedError) -> None:
        if not self._accepts_changes:
            raise error
        self.begin_epoch_anew()

    def _is_own_part(self) -> bool:
        return info_of(private_api.dataset_of(self._iterator)).is_own_part

    def _parts(self) -> int:
        is_own = self._is_own_part() and not self._is_dealt
        return int(private_api.strategy_of_iterator(self._iterator).num_replicas_in_sync) if is_own else 0

    def _is_continued(self) -> bool:
        """Returns whether an epoch continues the iterator of the previous one."""
        return self._iterator.steps_per_epoch is not None

    # Called by the hooks of Keras's epoch iterator.

    @contextlib.contextmanager
    def made(self, iterator: Any) -> Iterator[None]:
        """Sets the global seed while the epoch iterator is created, so that every run shuffles alike."""
        self._iterator = iterator
        own = private_api.global_seed()
        if self._seed is None:
            self._seed = random.SystemRandom().randrange(2**31) if own is None else own
        with _global_seed(self._seed):
            yield
        # With a global seed, Keras shuffles arrays alike in every epoch; without one it does not.
        self._redeals = own is None and private_api.shuffles_arrays(iterator)

    def count_iterator(self) -> None:
        """Counts a new iterator over the data."""
        if self._redeals:
            with _global_seed(int(self._seed or 0) + self._made):
                private_api.make_data_again(self._iterator)
        if self._reads_again and self._made:
            self._read.append(self._drawn)
        self._made, self._drawn = self._made + 1, 0

    def steps(self, original: Any, iterator: Any) -> Iterator[Any]:
        """Yields the steps of an epoch, without those that were trained on before a restart."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._require_same_data(resumed)
            if self.begins_anew:
                resumed = replace(resumed, batch=0, drawn=0)
            self._seek(resumed)
        done = 0 if resumed is None else resumed.batch
        self._random_at_epoch = _get_random()
        is_first, is_waiting, each = True, resumed is not None, int(iterator.steps_per_execution)
        for item in original(iterator):
            begin, *_, data = item  # Newer versions of Keras yield the last step, too.
            if is_first:
                is_first, self._in_use, self._drawn_before = False, self._made - 1, self._drawn
            self._drawn += each
            self._next = begin + each
            if self._next <= done:
                if not self._is_continued():
                    _skip_batches(data, each)
                continue
            if begin < done:
                raise data_order.other_executions(done, each)
            if is_waiting:
                is_waiting = False
                self._on_position()
            yield item
        if is_waiting:
            self._on_position()  # All steps of the epoch were done; only its end is left.

    def follow_validation(self, iterator: Any) -> bool:
        """Returns whether an epoch iterator is that of the evaluations of this `fit`, each on other rows of its data.

        These are the first `validation_steps` batches in the order of a new iterator, so `shuffle` chooses the rows.
        """
        is_of_fit = self._validation is None and self._validation_steps not in (None, 0)
        if is_of_fit and iterator.steps_per_epoch == self._validation_steps:
            self._validation = iterator
        return self._validation is iterator and data_order.reshuffles(private_api.given_dataset_of(iterator))

    def validate(self, original: Any, iterator: Any) -> Iterator[Any]:
        """Yields the steps of an evaluation, after those of the evaluations before a restart."""
        if not self._validations:
            for _ in range(self._validations_before):
                _skip_batches(iter(private_api.dataset_of(iterator)), int(iterator.steps_per_epoch))
        self._validations += 1
        yield from original(iterator)

    def _seek(self, resumed: DataState) -> None:
        iterator = self._iterator
        self._repeat_own_shuffling(resumed)
        before = _get_random()
        private_api.skip_epochs(iterator, resumed.epoch - resumed.first_epoch)
        if self._redeals:
            self._made = resumed.iterator
        while self._made < resumed.iterator:
            earlier = self._new_iterator()  # `shuffle` draws the seeds of an epoch when its iterator is created,
            if self._reads_again:  # or later, while the epoch is read.
                self._drawn = resumed.read[self._made - 1]
                _skip_batches(earlier, min(self._drawn, 1) if self._reads_again is Reads.FIRST_BATCH else self._drawn)
        if self._is_continued():
            current = self._new_iterator()
            _skip_batches(current, resumed.drawn + resumed.batch)
            self._drawn = resumed.drawn
            private_api.go_on_with(iterator, current, resumed.drawn)
            if not _are_equal(before, _get_random()):
                return  # A generator that shuffles with them goes on where it is.
        _set_random(resumed.random_at_epoch)

    def _new_iterator(self) -> Any:
        self.count_iterator()
        return iter(private_api.dataset_of(self._iterator))

    def _require_same_data(self, resumed: DataState) -> None:
        if self.begins_anew:
            return
        if self._parts() != resumed.parts:
            self._refuse(data_order.other_parts(self._parts(), resumed.parts))
        now, num_batches = private_api.num_batches_of(self._iterator), resumed.num_batches
        if self._is_dealt and (self._is_own_part() or num_batches is None):
            return  # The number of workers may change; only a single worker counts batches.
        if now is None and num_batches is not None:
            private_api.set_num_batches(self._iterator, num_batches)  # Keras learns it in the first epoch.
        elif now != num_batches:
            self._refuse(data_order.other_batches(now, num_batches))

    def _repeat_own_shuffling(self, resumed: DataState) -> None:
        """Repeats the epochs of a PyDataset, which may shuffle itself after each."""
        own = getattr(self._iterator.data_adapter, "py_dataset", None)
        if own is None:
            return
        before = _get_random()
        for _ in range(resumed.epoch - resumed.first_epoch):
            own.on_epoch_begin()
            own.on_epoch_end()
        pairs = zip(before, _get_random(), resumed.random_at_epoch, strict=True)
        if self._same_order and any(not _equal(old, new) and not _equal(new, saved) for old, new, saved in pairs):
            raise UnsupportedError(
                explain(
                    f"The order of {type(own).__name__}.on_epoch_end must be repeatable: other code has used the "
                    "global generators of Python or NumPy, too.",
                    do="Shuffle with its own generator: `self.random = np.random.default_rng(7)`.",
                )
            )


@contextlib.contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    own = private_api.global_seed()
    if own == seed:
        yield
        return
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        tf.random.set_seed(own)


@contextlib.contextmanager
def tracked(data: FitData) -> Iterator[None]:
    """Lets `data` track the first epoch iterator that is created in the body."""
    _LOCAL.pending = _LOCAL.running = data
    try:
        yield
    finally:
        _LOCAL.pending = _LOCAL.running = None


def pop_pending() -> FitData | None:
    """Returns the data that tracks the epoch iterator being created, once; None for other iterators."""
    data: FitData | None = getattr(_LOCAL, "pending", None)
    _LOCAL.pending = None
    return data


def follow_validation(iterator: Any) -> FitData | None:
    """Returns the `fit` whose evaluations a new epoch iterator is for, if they read a part of the data each."""
    running: FitData | None = getattr(_LOCAL, "running", None)
    return running if running is not None and running.follow_validation(iterator) else None


def is_tracking() -> bool:
    """Returns whether this thread is in a `fit` whose position in its data is tracked."""
    return getattr(_LOCAL, "running", None) is not None


def check_other_iterator(epoch_iterator: Any) -> None:
    """Raises an error if an iterator over other data advances the order of the training data."""
    running: FitData | None = getattr(_LOCAL, "running", None)
    if running is not None:
        running.require_unmoved(private_api.given_dataset_of(epoch_iterator))


def keep_logs(model: Any, logs: dict[str, Any] | None) -> None:
    """Stores the logs of the last step before a restart, for an epoch without further steps; None removes them."""
    if logs:
        _LOGS[model] = dict(logs)
    else:
        _LOGS.pop(model, None)


def kept_logs(model: Any) -> dict[str, Any]:
    """Returns the logs that `keep_logs` stored for a model, or an empty dict."""
    return _LOGS.get(model, {})


def _skip_batches(iterator: Any, batches: int) -> None:
    with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
        for _ in range(batches):
            next(iterator)


def _get_random() -> Any:
    return random.getstate(), np.random.get_state()


def _set_random(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _are_equal(states: Any, others: Any) -> bool:
    return all(_equal(one, other) for one, other in zip(states, others, strict=True))


def _equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
