"""Lets every rank read the same batches of a Python generator, however far its input pipeline reads ahead.

Keras reads a generator in passes: all epochs of a `fit` with `steps_per_epoch` are one pass, each evaluation on
`validation_data` is another, and so is a later call with the same generator. A pass goes on where the generator is. How
far the one before has read ahead depends on the number of replicas and on the speed of each rank, so ranks would go on
at different batches. So batches that a pass has read and no step has used are given back when it is over.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# In one process, tf.data holds one batch more than the steps have used; that one is lost.
_AHEAD = 1

_LOCAL = threading.local()


class _Source:
    """What several passes over a generator share.

    Args:
        generator: The user's generator.
    """

    def __init__(self, generator: Iterator[Any]):
        self.lock = threading.Lock()  # The threads of two pipelines can read at the same time.
        self.given_back: collections.deque[Any] = collections.deque()
        self.over: list[GeneratorReader] = []
        self.lost = 0
        self._generator = weakref.ref(generator)

    def next(self) -> Any:
        """Returns the next batch; the caller holds the lock."""
        for reader in self.over:
            reader.give_back()
        self.over.clear()
        while self.lost:
            self.lost -= 1
            self._next()
        return self._next()

    def _next(self) -> Any:
        if self.given_back:
            return self.given_back.popleft()
        generator = self._generator()
        if generator is None:
            raise StopIteration
        return next(generator)


_sources: weakref.WeakKeyDictionary[Any, _Source] = weakref.WeakKeyDictionary()


class GeneratorReader:
    """The passes of one epoch iterator over a generator.

    Args:
        generator: The user's generator.
    """

    def __init__(self, generator: Iterator[Any]):
        self._generator: Any = generator  # A source does not keep it.
        self._source = _sources.setdefault(generator, _Source(generator))
        self._first: list[Any] = []
        self._read: collections.deque[Any] = collections.deque()
        self._forgotten = self._used = self._pass = 0
        getattr(_LOCAL, "readers", []).append(self)

    def peek(self) -> Iterator[Any]:
        """Yields the first batches, from which Keras learns their shapes, and which every pass begins with."""
        while True:
            with self._source.lock:
                try:
                    batch = self._source.next()
                except StopIteration:
                    return
                self._first.append(batch)
            yield batch

    def begin_pass(self) -> Iterator[Any]:
        """Ends the pass before, and returns an iterator over the batches of a new one."""
        with self._source.lock:
            self.give_back()
            self._pass += 1
            return itertools.chain(list(self._first), self._rest(self._pass))

    def _rest(self, number: int) -> Iterator[Any]:
        while True:
            with self._source.lock:
                if number != self._pass:
                    return
                try:
                    batch = self._source.next()
                except StopIteration:
                    return
                # A generator may fill the same array again.
                self._read.append(tf.nest.map_structure(lambda v: v.copy() if isinstance(v, np.ndarray) else v, batch))
                while self._read and self._forgotten < self._gone():
                    self._read.popleft()
                    self._forgotten += 1
            yield batch

    def steps(self, original: Callable[[Any], Iterator[Any]], iterator: Any) -> Iterator[Any]:
        """Yields the steps of an epoch, and counts the batches that they use.

        Args:
            original: Yields them.
            iterator: Keras's epoch iterator.
        """
        batches = int(iterator.steps_per_execution)
        for step in original(iterator):
            try:
                yield step
            finally:
                self._used += batches

    def end(self) -> None:
        """Ends the last pass. Does not wait for the generator, which may be working on a batch."""
        self._pass += 1
        self._generator = None
        self._source.over.append(self)

    def give_back(self) -> None:
        """Gives back the batches that no step of this pass has used; the caller holds the lock of the source."""
        for _ in range(min(self._gone() - self._forgotten, len(self._read))):
            self._read.popleft()
            self._forgotten += 1
        self._source.lost += max(self._gone() - self._forgotten, 0)
        self._source.given_back.extendleft(reversed(self._read))
        self._read.clear()
        self._forgotten = self._used = 0

    def _gone(self) -> int:
        """Returns how many batches of this pass, without the first ones, are used or lost."""
        return max(self._used + _AHEAD - len(self._first), 0) if self._used else 0


def reader_of(data: Any) -> GeneratorReader | None:
    """Returns a reader of the data of an epoch iterator if it is a Python generator, else None."""
    return GeneratorReader(data) if isinstance(data, types.GeneratorType) else None


@contextlib.contextmanager
def ending_readers() -> Iterator[None]:
    """Ends the readers that are made in its body, which is a call of `fit`, `evaluate` or `predict`."""
    before, _LOCAL.readers = getattr(_LOCAL, "readers", []), []
    try:
        yield
    finally:
        for reader in _LOCAL.readers:
            reader.end()
        _LOCAL.readers = before
