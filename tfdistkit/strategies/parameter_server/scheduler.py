"""`fit` and `evaluate` of a parameter-server job: the coordinator hands out batches, the workers run the steps.

The coordinator draws each batch from the user's data and sends it with the step, so every row is used once
whatever happens to a worker: TensorFlow gives the step of a worker that died, batch and all, to another one.
Data that should be read by the workers themselves comes as a `WorkerDataset`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import data_position, private_api
from tfdistkit.strategies.parameter_server import atomic_updates, replayed_updates
from tfdistkit.strategies.parameter_server.inflight import SentStep, step_ended
from tfdistkit.strategies.parameter_server.packed_sums import added, packed, same, unpacked
from tfdistkit.strategies.parameter_server.profiling import CoordinatedClock, stopwatch, with_input
from tfdistkit.strategies.parameter_server.worker_datasets import WorkerIterator, drawn

# Seconds after which it is looked at steps that nobody was told of: one that failed, say.
_POLL_EVERY_S = 0.05
# Seconds between two looks at whether waiting still makes sense.
_LOOK_EVERY_S = 0.5


class CoordinatedFunction:
    """What Keras calls for each step, or for each `steps_per_execution` of them.

    Args:
        strategy: The strategy, which says how many steps may be on their way, and whether the workers live.
        model: The Keras model.
        step_function: Its `train_step` or `test_step`.
        clock: What measures the steps, if something does.
    """

    def __init__(
        self, strategy: Any, model: Any, step_function: Callable[[Any], Any], clock: CoordinatedClock | None = None
    ):
        self._strategy = strategy
        self._model = model
        self._job = _Job(strategy, model, step_function, clock)
        self._clock = clock or CoordinatedClock(strategy.num_workers)
        self._iterator: Any = None
        # Steps on their way, by their number.
        self._sent: dict[int, SentStep] = {}
        self._numbers = itertools.count()
        # Workers without more data of their own, and the steps that found none and have to be made up for.
        self._dry: set[int] = set()
        self._owed = 0

    def __call__(self, iterator: Any) -> Any:
        with self._clock.execution():
            logs = self._execute(iterator)
        if self._clock.has_warmed_up():
            self._make_room(0)
            self._clock.reset()
        return logs

    def _execute(self, iterator: Any) -> Any:
        try:
            if self._strategy.unfinished is not self:
                self._begin(iterator)
            if isinstance(iterator, WorkerIterator):
                self._send_for_own_data(1)
            else:
                self._send_batches()
            return self._logs(wait=not isinstance(iterator, (tf.data.Iterator, WorkerIterator)))
        except StopIteration:
            raise
        except BaseException:
            self._strategy.abandon_steps()
            raise

    def forget(self) -> None:
        """Forgets what is on its way; the next call begins anew."""
        self._sent.clear()
        self._owed = 0
        self._job.clear()

    def _begin(self, iterator: Any) -> None:
        """A new epoch, or a new run; `fit` may go on with the iterator of the epoch before."""
        private_api.wait_for_own_operations_only()
        if self._strategy.unfinished is not None:
            # A callback evaluates in the middle of an epoch. Keras has reset the metrics for it already.
            self._strategy.unfinished.finish(store=False)
        if iterator is not self._iterator:
            self._dry = set()
            self._job.begin_other_data()
        self._iterator, self._owed = iterator, 0
        self._numbers = itertools.count()
        self._job.clear()
        if data_position.kept_logs(self._model):  # An epoch that goes on where another run broke it off.
            self._job.count_on()
        self._strategy.unfinished = self

    def _send_batches(self) -> None:
        with self._clock.input():
            batches = tuple(itertools.islice(drawn(self._iterator), int(self._model.steps_per_execution)))
        if not batches:
            self.finish()
            raise StopIteration
        step = self._job.on_batches(batches, getattr(self._iterator, "element_spec", None))
        self._make_room(self._strategy.max_inflight)
        self._sent[next(self._numbers)] = SentStep(self._strategy.schedule, step, batches)

    def _send_for_own_data(self, steps: int) -> None:
        iterator = self._iterator
        step = self._job.on_own_data(iterator.element_spec, int(self._model.steps_per_execution))
        self._owed += steps
        while self._owed:
            # A worker that ran dry answers at once, and must not be asked all the time.
            self._make_room(self._strategy.num_workers - len(self._dry) if self._dry else self._strategy.max_inflight)
            if self._dry | self._strategy.lost_workers() >= set(range(self._strategy.num_workers)):
                self._owed = 0
                self.finish()
                raise StopIteration
            own_data = (iterator.remote(), iterator.worker_ids())
            self._sent[next(self._numbers)] = SentStep(self._strategy.schedule, step, own_data)
            self._owed -= 1

    def _logs(self, wait: bool) -> Any:
        """Returns the logs of what is done; Keras needs some after the first step, to know their names."""
        if wait:
            self.finish()
            return self._model.get_metrics_result() if self._job.logs_are_metrics else self._job.logs
        self._collect_what_is_done()
        while self._job.logs is None and self._sent:
            self._make_room(0)
        self._job.returned = self._job.logs if self._job.logs is not None else {}
        return self._job.returned

    def finish(self, store: bool = True) -> None:
        """Waits for all steps, and gives the metrics of the model what they came to.

        Args:
            store: Whether it does the latter.
        """
        self._make_room(0)
        while self._owed:
            try:
                self._send_for_own_data(0)
            except StopIteration:
                break
            self._make_room(0)
        self._clock.end()
        if store:
            self._job.store()
            self._job.complete_logs()
        if self._strategy.unfinished is self:
            self._strategy.unfinished = None

    def settle(self) -> None:
        """Waits for the steps that are on their way, and writes what they came to, in the middle of an epoch."""
        self._make_room(0)
        self._job.store()

    def _make_room(self, most: int) -> None:
        """Waits until at most so many steps are on their way, less one for the next."""
        looked = time.monotonic()
        while len(self._sent) > max(0, most - 1):
            step_ended.clear()
            if not self._collect_what_is_done():
                with self._clock.waiting():
                    step_ended.wait(_POLL_EVERY_S)
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    looked = time.monotonic()
                    self._strategy.check_workers()

    def _collect_what_is_done(self) -> bool:
        collected = False
        for number in [n for n, sent in self._sent.items() if sent.has_ended()]:
            try:
                result = self._sent[number].result()
            except tf.errors.CancelledError:
                self._strategy.raise_errors_of_steps()  # What another step raised, for which this one was cancelled.
                raise
            if result is None:
                continue
            del self._sent[number]
            collected = True
            done, worker = self._job.take(number, result)
            self._owed += not done
            if worker >= 0:
                self._dry.add(worker)
        return collected


class _Job:
    """What the workers run, and what their results come to."""

    def __init__(self, strategy: Any, model: Any, step_function: Callable[[Any], Any], clock: CoordinatedClock | None):
        self._strategy, self._model, self._step_function, self._clock = strategy, model, step_function, clock
        # Results that came before those of earlier steps; the order of the sums makes the last bits.
        self._early: dict[int, Any] = {}
        self._next = 0
        self._sums: list[np.ndarray] | None = None
        # What the variables of the metrics hold of this epoch already.
        self._stored: list[np.ndarray] | None = None
        self.logs: Any = None
        # What Keras got last: for a train_step with logs of its own, it takes them for those of the epoch.
        self.returned: Any = None
        self.logs_are_metrics = False
        self._results: Any = None
        # The metrics of which nothing is known, once a step was traced that has some.
        self._replayed: replayed_updates.Replayed | None = None
        self._one_step: Any = None
        # By how many they take: TensorFlow fails to generalize a function over the number of its arguments.
        self._on_batches: dict[int, Any] = {}
        self._own_data: dict[int, Any] = {}
        # What those on batches became for data like this iterator's: TensorFlow would look twice in every step.
        self._traced: dict[Any, Any] = {}

    def begin_other_data(self) -> None:
        """The batches are of another dataset from now on, perhaps of another structure."""
        self._traced = {}

    def on_batches(self, batches: tuple[Any, ...], element_spec: Any = None) -> Any:
        """Returns a step that takes batches like these, as many of them, as its arguments.

        Args:
            batches: The batches.
            element_spec: That of their dataset: a step knows of shapes, by which Keras weighs losses, no more.
        """
        leaves = tf.nest.flatten(batches)
        if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
            return self._on_any_batches(batches)
        like: Any = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        given = batches
        if all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(element_spec or [None])):
            like, given = (len(batches),), (element_spec,) * len(batches)
        if like not in self._traced:
            self._traced[like] = self._on_any_batches(given).get_concrete_function(*given)
        return self._traced[like]

    def _on_any_batches(self, batches: tuple[Any, ...]) -> Any:
        if len(batches) not in self._on_batches:
            one_step = self._choose_step(batches[0])

            @tf.autograph.experimental.do_not_convert
            def on_batches(*batches: Any) -> Any:
                sums, logs, records = one_step(batches[0])
                for batch in batches[1:]:
                    more, logs, more_records = one_step(batch)
                    sums = [a + b for a, b in zip(sums, more)]
                    records = [*records, *more_records]
                return sums, logs, [], records

            self._on_batches[len(batches)] = tf.function(on_batches, autograph=False, reduce_retracing=True)
        return self._on_batches[len(batches)]

    def on_own_data(self, element_spec: Any, steps: int) -> Any:
        """Returns a step that takes its batches from the worker's own iterator."""
        if steps not in self._own_data:
            self._choose_step(element_spec)
            self._own_data[steps] = self._make_on_own_data(element_spec, steps)
        return self._own_data[steps]

    def _choose_step(self, batch: Any) -> Any:
        """Collects the metrics, unless the logs are more than the results of the metrics.

        A `train_step` of the user's own that returns other logs reads its metrics for them, and has to read
        what all steps came to: then they are written in every step.
        """
        if self._one_step is None:
            like = private_api.type_specs(batch)
            collecting = self._make_step(collect=True)
            collecting.get_concrete_function(like)
            self._one_step = collecting if self.logs_are_metrics else self._make_step(collect=False)
        return self._one_step

    def _make_step(self, collect: bool) -> Any:
        model = self._model

        @tf.autograph.experimental.do_not_convert
        def one(batch: Any) -> Any:
            collected = model.metrics_variables if collect else ()
            with (
                stopwatch(self._clock) as watch,
                atomic_updates.running(collected) as updates,
                replayed_updates.recording() as records,
            ):
                logs = self._strategy.run(self._step_function, args=(batch,))
                self.logs_are_metrics = isinstance(logs, dict) and set(logs) == set(model.get_metrics_result())
            if records.updates and self._replayed is None:
                self._replayed = replayed_updates.Replayed(records.updates)
            seen = [] if watch is None else [watch.seen(batch, logs)]
            return packed([*updates.sums(), *seen]), {} if self.logs_are_metrics else logs, records.tensors

        return tf.function(one, reduce_retracing=True, autograph=False)

    def _make_on_own_data(self, element_spec: Any, steps: int) -> Any:
        # An OutOfRangeError would be an error of the whole job, so nothing raises it: a worker that ran dry says so.
        spec = self._one_step.get_concrete_function(private_api.type_specs(element_spec)).structured_outputs
        nothing = tf.nest.map_structure(lambda t: tf.zeros([size or 0 for size in t.shape], t.dtype), spec)

        @tf.autograph.experimental.do_not_convert
        def on_own_data(iterator: Any, worker: Any) -> Any:
            began = None if self._clock is None else tf.timestamp()
            sums, logs, _ = nothing
            records = []
            done, dry = tf.constant(0), tf.constant(False)
            for _ in range(steps):
                batch = iterator.get_next_as_optional()
                run, skip = partial(self._run_one, batch), partial(same, (nothing[0], logs, nothing[2]))
                more, logs, more_records = tf.cond(batch.has_value(), run, skip)
                sums = [a + b for a, b in zip(sums, more)]
                records += more_records
                done += tf.cast(batch.has_value(), tf.int32)
                dry = tf.logical_not(batch.has_value())
            if self._clock is not None:
                sums = with_input(sums, began)
            # Whether it did any, and the worker that has no more; together, for every tensor travels on its own.
            return sums, logs, [tf.stack([done, tf.where(dry, worker, -1)])], records

        return tf.function(on_own_data, autograph=False)

    def _run_one(self, batch: Any) -> Any:
        return self._one_step(batch.get_value())

    def clear(self) -> None:
        """Forgets what the steps of an epoch came to."""
        self._sums, self._stored, self.logs, self._early, self._next = None, None, None, {}, 0
        if self._replayed is not None:
            self._replayed.forget()

    def count_on(self) -> None:
        """Adds the steps to what the metrics have counted before."""
        values = [tf.convert_to_tensor(private_api.raw_variable(v)) for v in self._model.metrics_variables]
        self._stored = [vector.numpy() for vector in packed(values)]

    def take(self, number: int, result: Any) -> tuple[bool, int]:
        """Adds the result of a step; returns whether it had batches, and the worker that has no more, or -1."""
        sums, logs, own_data, records = result
        sums = [value.numpy() for value in sums]
        if self._clock is not None:
            self._clock.take(sums)
        done, dry = (int(value) for value in own_data[0]) if own_data else (1, -1)
        if own_data and records:  # Those that found data came first.
            records = records[: len(records) * done // int(self._model.steps_per_execution)]
        self._early[number] = (sums, logs, records) if done else None
        before, newest = self._sums, None
        while self._next in self._early:
            result = self._early.pop(self._next)
            self._next += 1
            if result is not None:
                more, newest, records = result
                self._sums = added(self._sums, more)
                self._replay(records)
        if self._sums is not None and self._sums is not before:
            total = map(tf.constant, added(self._stored, self._sums))
            self.logs = self._results_of(list(total)) if self.logs_are_metrics else newest
        return done > 0, dry

    def _replay(self, records: list[tf.Tensor]) -> None:
        if self._replayed is None:
            return
        self._replayed.replay(records)
        if not self.logs_are_metrics:  # The steps to come may read them.
            self._replayed.store()

    def store(self) -> None:
        """Adds what the steps came to, to the metrics of the model."""
        if self._replayed is not None:
            self._replayed.store()
        if self._sums is None or not self.logs_are_metrics:
            return  # Metrics that are no more than logs are written in every step.
        variables = self._model.metrics_variables
        replayed = {id(v) for v in self._replayed.variables} if self._replayed is not None else ()
        for variable, value in zip(variables, unpacked(self._sums, variables)):
            if id(variable) not in replayed:
                private_api.raw_variable(variable).assign_add(value)
        self._stored, self._sums = added(self._stored, self._sums), None

    def complete_logs(self) -> None:
        """Lets the last logs, which Keras takes for those of the epoch, show the metrics after the last step."""
        if not self.logs_are_metrics and isinstance(self.logs, dict) and isinstance(self.returned, dict):
            results = self._model.get_metrics_result()
            self.returned.update({name: results.get(name, value) for name, value in self.logs.items()})

    def _results_of(self, sums: list[tf.Tensor]) -> Any:
        state = [] if self._replayed is None else self._replayed.state()
        if self._results is None:
            self._results = tf.function(self._compute_results, autograph=False).get_concrete_function(sums, state)
        return self._results(sums, state)

    def _compute_results(self, sums: list[tf.Tensor], state: list[tf.Tensor]) -> Any:
        variables = self._model.metrics_variables
        mapping = list(zip(variables, unpacked(sums, variables)))
        if self._replayed is not None:
            mapping += zip(self._replayed.variables, state)  # The last one of a variable counts.
        with keras.StatelessScope(state_mapping=mapping):
            return self._model.get_metrics_result()
