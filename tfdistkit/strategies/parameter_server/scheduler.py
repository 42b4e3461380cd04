"""Schedules the steps of `fit` and `evaluate` of a parameter-server job: the coordinator sends batches to the workers.

The coordinator reads each batch from the user's data and sends it with the step, so every row is used exactly once
even if workers fail: TensorFlow reschedules the step of a lost worker, with its batch, on another worker. Data that
the workers read themselves is a `WorkerDataset`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.keras_adapter import data_position, private_api
from tfdistkit.strategies.parameter_server import atomic_updates
from tfdistkit.strategies.parameter_server.inflight import InflightStep, step_ended
from tfdistkit.strategies.parameter_server.profiling import CoordinatedClock
from tfdistkit.strategies.parameter_server.worker_datasets import WorkerIterator, batches_of
from tfdistkit.strategies.parameter_server.worker_steps import WorkerSteps

# Fallback poll interval, in seconds, for steps that finish without a notification, such as failed ones.
_POLL_EVERY_S = 0.05
# Seconds between two liveness checks of the tasks.
_CHECK_EVERY_S = 0.5


class CoordinatedFunction:
    """Runs one execution of Keras (`steps_per_execution` steps) on a worker; called by `fit` and `evaluate`.

    Args:
        strategy: The strategy, which limits the steps in flight and checks that the workers are alive.
        model: The Keras model.
        step_function: Its `train_step` or `test_step`.
        clock: Measures the steps; None for no measurement.
    """

    def __init__(
        self, strategy: Any, model: Any, step_function: Callable[[Any], Any], clock: CoordinatedClock | None = None
    ):
        self._strategy = strategy
        self._model = model
        self._job = WorkerSteps(strategy, model, step_function, clock)
        self._clock = clock or CoordinatedClock(strategy.num_workers)
        self._iterator: Any = None
        # Steps in flight, by their number.
        self._in_flight: dict[int, InflightStep] = {}
        self._numbers = itertools.count()
        # Workers whose data is exhausted, and the number of steps that found no data and must be scheduled again.
        self._exhausted: set[int] = set()
        self._missing_steps = 0
        # The thread of `fit`: the program reads and writes variables in the order of the steps there.
        self._thread = 0
        # No step writes it, and callbacks log it after each batch.
        self._learning_rate: Any = None

    def __call__(self, iterator: Any) -> Any:
        atomic_updates.watcher = None
        with self._clock.execution():
            logs = self._execute(iterator)
        if self._clock.has_warmed_up():
            self._wait_for_room(0)
            self._clock.reset()
        if self._strategy.unfinished is self:
            atomic_updates.watcher = self
        return logs

    def _execute(self, iterator: Any) -> Any:
        try:
            if self._strategy.unfinished is not self:
                self._begin(iterator)
            if isinstance(iterator, WorkerIterator):
                self._schedule_on_worker_data(1)
            else:
                self._schedule_batches()
            return self._logs(wait=not isinstance(iterator, (tf.data.Iterator, WorkerIterator)))
        except StopIteration:
            raise
        except BaseException:
            self._strategy.abandon_steps()
            raise

    def forget(self) -> None:
        """Drops the steps in flight; the next call begins anew."""
        atomic_updates.watcher = None
        self._in_flight.clear()
        self._missing_steps = 0
        self._job.clear()

    def _begin(self, iterator: Any) -> None:
        """Begins an epoch or a run; `fit` may reuse the iterator of the epoch before."""
        private_api.wait_for_own_operations_only()
        outer = self._strategy.unfinished
        if outer is not None:
            # A callback evaluates in the middle of an epoch. Keras has already reset the metrics of its model for it.
            outer.finish(store=outer._model is not self._model)
        if iterator is not self._iterator:
            self._exhausted = set()
            self._job.forget_traces()
        self._iterator, self._missing_steps = iterator, 0
        self._numbers = itertools.count()
        self._job.clear()
        if data_position.kept_logs(self._model):  # An epoch that is resumed in the middle.
            self._job.resume_counts()
        self._strategy.unfinished, self._thread = self, threading.get_ident()
        rate = getattr(self._model.optimizer, "learning_rate", None)
        self._learning_rate = private_api.raw_variable(rate) if isinstance(rate, keras.Variable) else None

    def before_write(self, variable: Any) -> None:
        """Waits for the steps in flight, which must read what the program wrote before them, and no later value."""
        if self._job.counts_in(variable) and self._is_in_order():
            self.settle()
            self._job.counts_change()
        else:
            self.before_use(private_api.raw_variable(variable), writes=True)

    def before_read(self, variable: Any) -> None:
        """Waits for the steps in flight, whose updates the program must read, and gives metrics their results."""
        if self._job.counts_in(variable) and self._is_in_order():
            self.settle()
        else:
            self.before_use(private_api.raw_variable(variable))

    def before_use(self, variable: Any, writes: bool = False) -> None:
        """Waits for the steps in flight, whose updates the program must read, and which must not read its own."""
        if (writes or variable is not self._learning_rate) and self._is_in_order():
            with self._unwatched():
                self._wait_for_room(0)

    def _is_in_order(self) -> bool:
        """Returns whether the program reads or writes between two steps: not in a thread of its own, or a generator."""
        return threading.get_ident() == self._thread

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Reads and writes variables without being told of it."""
        before, atomic_updates.watcher = atomic_updates.watcher, None
        try:
            yield
        except BaseException:  # A later write must not meet the error again.
            self._strategy.abandon_steps()
            raise
        atomic_updates.watcher = before

    def _schedule_batches(self) -> None:
        with self._clock.input():
            batches = tuple(itertools.islice(batches_of(self._iterator), int(self._model.steps_per_execution)))
        if not batches:
            self.finish()
            raise StopIteration
        step = self._job.on_batches(batches, getattr(self._iterator, "element_spec", None))
        self._wait_for_room(self._strategy.max_inflight)
        self._in_flight[next(self._numbers)] = InflightStep(self._strategy.schedule, step, batches)

    def _schedule_on_worker_data(self, steps: int) -> None:
        iterator, workers = self._iterator, self._strategy.num_workers
        step = self._job.on_worker_data(iterator.element_spec, int(self._model.steps_per_execution))
        self._missing_steps += steps
        while self._missing_steps:
            # A worker without data returns at once: limit the steps in flight to those of the other workers.
            self._wait_for_room(workers - len(self._exhausted) if self._exhausted else self._strategy.max_inflight)
            if self._exhausted | self._strategy.lost_workers() >= set(range(workers)):
                self._missing_steps = 0
                self.finish()
                raise StopIteration
            worker_data = (iterator.remote(), iterator.worker_ids())
            self._in_flight[next(self._numbers)] = InflightStep(self._strategy.schedule, step, worker_data)
            self._missing_steps -= 1

    def _logs(self, wait: bool) -> Any:
        """Returns the logs of the finished steps; Keras needs logs after the first step, for their names."""
        if wait:
            self.finish()
            return self._model.get_metrics_result() if self._job.logs_are_metrics else self._job.logs
        self._collect_finished()
        while self._job.logs is None and self._in_flight:
            self._wait_for_room(0)
        self._job.returned = self._job.logs if self._job.logs is not None else {}
        return self._job.returned

    def finish(self, store: bool = True) -> None:
        """Waits for all steps, and adds their results to the metrics of the model.

        Args:
            store: Whether to add the results to the metrics.
        """
        atomic_updates.watcher = None
        self._wait_for_room(0)
        while self._missing_steps:
            try:
                self._schedule_on_worker_data(0)
            except StopIteration:
                break
            self._wait_for_room(0)
        self._clock.end()
        if store:
            self._job.store()
            self._job.complete_logs()
        if self._strategy.unfinished is self:
            self._strategy.unfinished = None

    def settle(self) -> None:
        """Waits for the steps in flight in the middle of an epoch, and adds their results to the metrics."""
        with self._unwatched():
            self._wait_for_room(0)
            self._job.store()

    def _wait_for_room(self, limit: int) -> None:
        """Waits until another step can be scheduled with at most `limit` steps in flight; 0 waits for all steps."""
        checked = time.monotonic()
        while len(self._in_flight) > max(0, limit - 1):
            step_ended.clear()
            if not self._collect_finished():
                with self._clock.waiting():
                    step_ended.wait(_POLL_EVERY_S)
                if time.monotonic() - checked > _CHECK_EVERY_S:
                    checked = time.monotonic()
                    self._strategy.check_workers()

    def _collect_finished(self) -> bool:
        collected = False
        for number in [n for n, step in self._in_flight.items() if step.has_ended()]:
            try:
                result = self._in_flight[number].result()
            except tf.errors.CancelledError:
                self._strategy.raise_errors_of_steps()  # The error of the step that cancelled this one.
                raise
            if result is None:
                continue
            del self._in_flight[number]
            collected = True
            had_data, worker = self._job.add_result(number, result)
            self._missing_steps += not had_data
            if worker >= 0:
                self._exhausted.add(worker)
        return collected
