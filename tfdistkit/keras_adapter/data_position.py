"""Where in its data a `fit` is, and a `fit` that begins in the middle of an epoch.

Training that goes on after a restart must see the rest of the epoch, in the order of the run that broke off. For
that the order is made again - the same seeds, as many iterators over the data as there had been - and the batches
that were trained on are drawn and left out. So nothing has to be known about the data but that it repeats itself.
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

from tfdistkit.data.dataset_metadata import ONE_ORDER, has_mark
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import data_order, private_api

_LOCAL = threading.local()
# Of a model in an epoch that was resumed: the logs of its last step before the restart.
_LOGS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class DataState:
    """Where in its data a `fit` is, in plain data.

    Args:
        epoch: The epoch to go on with, from 0.
        batch: The first batch of it that was not trained on.
        first_epoch: The epoch in which the first run began.
        iterator: How many iterators over the data were made before the one of this epoch.
        drawn: How many batches of it belong to earlier epochs (with `steps_per_epoch`).
        num_batches: How many batches an epoch has, as far as Keras knew; None for a worker's own part.
        seed: What arrays are shuffled by.
        order: The seeds of the dataset's own shuffling.
        parts: In how many parts the user divided the data, one for each replica; 0 if tfdistkit divides it, or if the
            parts together are what one process would see.
        random_at_fit: What the global generators of Python and NumPy were when `fit` was called.
        random_at_epoch: And when the epoch began.
        read: How many batches of each of those iterators were read, where that decides the order of the next.
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


class FitData:
    """The training data of one `fit`: follows where it is, and begins where another `fit` broke off.

    Args:
        x: The argument of `fit`.
        first_epoch: Its `initial_epoch`.
        resumed: Where to begin; None for the beginning.
        same_order: Whether data whose order cannot be repeated is an error.
        on_position: Called when the first step would be the next to run.
        accept_changes: Whether data that is not that of `resumed` is trained on, from the beginning of the epoch.

    Raises:
        UnsupportedError: if the order of the data cannot be repeated, or is not that of `resumed`.
    """

    def __init__(
        self, x: Any, first_epoch: int, resumed: DataState | None, same_order: bool, on_position: Callable[[], None],
        accept_changes: bool = False,
    ):  # fmt: skip
        self.first_epoch = first_epoch if resumed is None else resumed.first_epoch
        self._order = data_order.order_of(x, same_order)
        self._is_dealt = isinstance(x, tf.data.Dataset) and has_mark(x, ONE_ORDER) and not data_order.shuffles(x)
        self._resumed, self._same_order, self._on_position = resumed, same_order, on_position
        self._x, self._must_be_read = x, data_order.must_be_read_again(x)
        self._read: list[int] = []
        self._accepts_changes, self.begins_anew = accept_changes, False
        self._iterator: Any = None
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
        """How many steps of the epoch have been handed out."""
        return self._next

    def state_in_epoch(self, epoch: int) -> DataState:
        """Returns where this is, within an epoch, after the steps that have been handed out."""
        return self._state(epoch, self._next, self._in_use, self._drawn_before, self._random_at_epoch)

    def state_after_epoch(self, epoch: int) -> DataState:
        """Returns where this is at the end of an epoch."""
        goes_on = self._is_continued() and private_api.has_iterator(self._iterator)
        place = (self._made - 1, self._drawn) if goes_on else (self._made, 0)
        return self._state(epoch + 1, 0, *place, _get_random())

    def _state(self, epoch: int, batch: int, iterator: int, drawn: int, random_at_epoch: Any) -> DataState:
        num_batches = None if self._is_own_part() else private_api.num_batches_of(self._iterator)
        return DataState(
            epoch, batch, self.first_epoch, iterator, drawn, num_batches,
            int(self._seed or 0), self._order, self._parts(), self._random_at_fit, random_at_epoch,
            [*self._read, self._drawn][:iterator] if self._must_be_read else [],
        )  # fmt: skip

    def require_unmoved(self, read: Any) -> None:
        """Raises an error if reading other data moves the order of this on.

        Args:
            read: What is read beside it.
        """
        if self._same_order:
            data_order.require_order_of_its_own(self._x, read)

    def begin_epoch_anew(self) -> None:
        """The data is not that of the backup, and nobody can tell which rows of the epoch were seen."""
        self.begins_anew = True

    def _refuse(self, error: UnsupportedError) -> None:
        if not self._accepts_changes:
            raise error
        self.begin_epoch_anew()

    def _is_own_part(self) -> bool:
        return bool(getattr(private_api.dataset_of(self._iterator), "tfdistkit_is_own_part", False))

    def _parts(self) -> int:
        is_own = self._is_own_part() and not self._is_dealt
        return int(private_api.strategy_of_iterator(self._iterator).num_replicas_in_sync) if is_own else 0

    def _is_continued(self) -> bool:
        """Whether an epoch goes on with the iterator of the one before."""
        return self._iterator.steps_per_epoch is not None

    # What the hooks of Keras's epoch iterator call.

    @contextlib.contextmanager
    def made(self, iterator: Any) -> Iterator[None]:
        """Around the making of the epoch iterator: what shuffles there does so alike in every run."""
        self._iterator = iterator
        own = private_api.global_seed()
        if self._seed is None:
            self._seed = random.SystemRandom().randrange(2**31) if own is None else own
        with _global_seed(self._seed):
            yield
        # With a seed, Keras shuffles arrays alike in every epoch; without one it does not.
        self._redeals = own is None and private_api.shuffles_arrays(iterator)

    def count_iterator(self) -> None:
        """Another iterator over the data is made."""
        if self._redeals:
            with _global_seed(int(self._seed or 0) + self._made):
                private_api.make_data_again(self._iterator)
        if self._must_be_read and self._made:
            self._read.append(self._drawn)
        self._made, self._drawn = self._made + 1, 0

    def steps(self, original: Any, iterator: Any) -> Iterator[Any]:
        """The steps of an epoch; those that were trained on before a restart are left out."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._require_same_data(resumed)
            if self.begins_anew:
                resumed = replace(resumed, batch=0, drawn=0)
            self._go_to(resumed)
        done = 0 if resumed is None else resumed.batch
        self._random_at_epoch = _get_random()
        is_first, is_waiting, each = True, resumed is not None, int(iterator.steps_per_execution)
        for item in original(iterator):
            begin, *_, data = item  # Newer versions of Keras tell the last step, too.
            if is_first:
                is_first, self._in_use, self._drawn_before = False, self._made - 1, self._drawn
            self._drawn += each
            self._next = begin + each
            if self._next <= done:
                if not self._is_continued():
                    _draw(data, each)
                continue
            if begin < done:
                raise data_order.other_executions(done, each)
            if is_waiting:
                is_waiting = False
                self._on_position()
            yield item
        if is_waiting:
            self._on_position()  # All steps of the epoch were done; what is left is its end.

    def _go_to(self, resumed: DataState) -> None:
        iterator = self._iterator
        self._repeat_own_shuffling(resumed)
        if self._redeals:
            self._made = resumed.iterator
        while self._made < resumed.iterator:
            earlier = self._new_iterator()  # `shuffle` draws the seeds of an epoch when an iterator is made,
            if self._must_be_read:  # and in the middle of it where a `repeat` comes after.
                self._drawn = resumed.read[self._made - 1]
                _draw(earlier, self._drawn)
        _set_random(resumed.random_at_epoch)
        if self._is_continued():
            current = self._new_iterator()
            _draw(current, resumed.drawn + resumed.batch)
            self._drawn = resumed.drawn
            private_api.go_on_with(iterator, current, resumed.drawn)

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
            return  # On as many workers as it may be, of which one that is alone counts batches, and several do not.
        if now is None and num_batches is not None:
            private_api.set_num_batches(self._iterator, num_batches)  # Keras learns it in the first epoch.
        elif now != num_batches:
            self._refuse(data_order.other_batches(now, num_batches))

    def _repeat_own_shuffling(self, resumed: DataState) -> None:
        """A PyDataset may shuffle itself after each epoch."""
        own = private_api.py_dataset_of(self._iterator)
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
                    f"The order that {type(own).__name__}.on_epoch_end makes cannot be repeated: something else has "
                    "used the global generators of Python or NumPy, too.",
                    do="Shuffle with a generator of its own: `self.random = np.random.default_rng(7)`.",
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
def followed(data: FitData) -> Iterator[None]:
    """Within it, the first epoch iterator that is made belongs to `data`."""
    _LOCAL.next = _LOCAL.running = data
    try:
        yield
    finally:
        _LOCAL.next = _LOCAL.running = None


def take_next() -> FitData | None:
    """Returns whose epoch iterator is being made, once."""
    data: FitData | None = getattr(_LOCAL, "next", None)
    _LOCAL.next = None
    return data


def read_beside(epoch_iterator: Any) -> None:
    """Called for each iterator over data that is not trained on: it must not move on the order of what is."""
    running: FitData | None = getattr(_LOCAL, "running", None)
    if running is not None:
        running.require_unmoved(private_api.given_dataset_of(epoch_iterator))


def keep_logs(model: Any, logs: dict[str, Any] | None) -> None:
    """Keeps the logs of the last step before a restart, for an epoch in which no step is left; None forgets them."""
    if logs:
        _LOGS[model] = dict(logs)
    else:
        _LOGS.pop(model, None)


def kept_logs(model: Any) -> dict[str, Any]:
    """Returns what `keep_logs` keeps; nothing for most models at most times."""
    return _LOGS.get(model, {})


def _draw(iterator: Any, batches: int) -> None:
    with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
        for _ in range(batches):
            next(iterator)


def _get_random() -> Any:
    return random.getstate(), np.random.get_state()


def _set_random(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
