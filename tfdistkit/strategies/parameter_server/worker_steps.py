"""The functions that the workers of a parameter-server job run, and the sum of their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.parameter_server import atomic_updates, replayed_updates
from tfdistkit.strategies.parameter_server.epoch_logs import names_of_results, with_results
from tfdistkit.strategies.parameter_server.packed_sums import added, packed, same, unpacked
from tfdistkit.strategies.parameter_server.profiling import CoordinatedClock, stopwatch, with_input


class WorkerSteps:
    """Builds the functions that the workers run, and adds up their results."""

    def __init__(self, strategy: Any, model: Any, step_function: Callable[[Any], Any], clock: CoordinatedClock | None):
        self._strategy, self._model, self._step_function, self._clock = strategy, model, step_function, clock
        self._any_rows = not model.run_eagerly  # With it, Keras weighs losses by the rows of each batch.
        # Results that came before those of earlier steps: sums in the order of the batches are bitwise reproducible.
        self._early: dict[int, Any] = {}
        self._next = 0
        self._sums: list[np.ndarray] | None = None
        # The part of this epoch's sums that the variables of the metrics already hold.
        self._stored: list[np.ndarray] | None = None
        self.logs: Any = None
        # The logs that Keras received last. For a train_step with its own logs, Keras uses them for the epoch.
        self.returned: Any = None
        self.logs_are_metrics, self._result_names = False, frozenset[str]()
        # Whether the program has written the variables of the metrics since the last step.
        self._counts_changed = False
        # Whether a step trains by the value of a metric.
        self._metrics_train = False
        self._results: Any = None
        # The metrics that may not be additive, once a step with such metrics was traced.
        self._replayed: replayed_updates.Replayed | None = None
        self._one_step: Any = None
        # By the number of batches: TensorFlow cannot generalize a function over the number of its arguments.
        self._on_batches: dict[int, Any] = {}
        self._on_worker_data: dict[int, Any] = {}
        # Concrete functions by input signature: TensorFlow's own lookup costs time in every step.
        self._traced: dict[Any, Any] = {}

    def forget_traces(self) -> None:
        """Clears the cache of concrete functions, for a dataset with perhaps another structure."""
        self._traced = {}

    def on_batches(self, batches: tuple[Any, ...], element_spec: Any = None) -> Any:
        """Returns a step that takes as many batches, of the same structure, as arguments.

        Args:
            batches: The batches.
            element_spec: The element spec of their dataset, whose static shapes Keras uses to weigh losses.
        """
        leaves = tf.nest.flatten(batches)
        if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
            return self._on_any_batches(batches)
        like: Any = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        given = batches
        if self._any_rows and all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(element_spec or [None])):
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

            self._on_batches[len(batches)] = tf.function(on_batches, autograph=False, reduce_retracing=self._any_rows)
        return self._on_batches[len(batches)]

    def on_worker_data(self, element_spec: Any, steps: int) -> Any:
        """Returns a step that takes its batches from the worker's own iterator."""
        if steps not in self._on_worker_data:
            self._choose_step(element_spec)
            self._on_worker_data[steps] = self._make_on_worker_data(element_spec, steps)
        return self._on_worker_data[steps]

    def _choose_step(self, batch: Any) -> Any:
        """Returns a step that collects the metrics, or writes them if the logs are more than the metrics' results.

        A custom `train_step` with other logs reads its metrics for them, and must read the sums of all steps, as one
        whose loss depends on a metric: then the metrics are written in every step.
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
                self._result_names = names_of_results(logs, updates.results)
                self._metrics_train = self._metrics_train or (collect and updates.sums_train())
                names = set(logs) if isinstance(logs, dict) and not self._metrics_train else None
                self.logs_are_metrics = names == set(model.get_metrics_result())
            if records.updates and self._replayed is None:
                self._replayed = replayed_updates.Replayed(records.updates)
            times = [] if watch is None else [watch.times(batch, logs)]
            return packed([*updates.sums(), *times]), {} if self.logs_are_metrics else logs, records.tensors

        return tf.function(one, reduce_retracing=self._any_rows, autograph=False)

    def _make_on_worker_data(self, element_spec: Any, steps: int) -> Any:
        # An OutOfRangeError would fail the whole job, so a worker without data returns its number instead.
        spec = self._one_step.get_concrete_function(private_api.type_specs(element_spec)).structured_outputs
        nothing = tf.nest.map_structure(lambda t: tf.zeros([size or 0 for size in t.shape], t.dtype), spec)

        @tf.autograph.experimental.do_not_convert
        def on_worker_data(iterator: Any, worker: Any) -> Any:
            began = None if self._clock is None else tf.timestamp()
            sums, logs, _ = nothing
            records = []
            done, is_exhausted = tf.constant(0), tf.constant(False)
            for _ in range(steps):
                batch = iterator.get_next_as_optional()
                run, skip = partial(self._run_one, batch), partial(same, (nothing[0], logs, nothing[2]))
                more, logs, more_records = tf.cond(batch.has_value(), run, skip)
                sums = [a + b for a, b in zip(sums, more)]
                records += more_records
                done += tf.cast(batch.has_value(), tf.int32)
                is_exhausted = tf.logical_not(batch.has_value())
            if self._clock is not None:
                sums = with_input(sums, began)
            # The number of steps, and the worker if its data is exhausted; in one tensor, because each is a message.
            return sums, logs, [tf.stack([done, tf.where(is_exhausted, worker, -1)])], records

        return tf.function(on_worker_data, autograph=False)

    def _run_one(self, batch: Any) -> Any:
        return self._one_step(batch.get_value())

    def clear(self) -> None:
        """Drops the results of the steps of an epoch."""
        self._sums, self._stored, self.logs, self._early, self._next = None, None, None, {}, 0
        self._counts_changed = False
        if self._replayed is not None:
            self._replayed.forget()

    def resume_counts(self) -> None:
        """Starts from the counts that the metrics already hold."""
        values = [tf.convert_to_tensor(private_api.raw_variable(v)) for v in self._model.metrics_variables]
        self._stored = [vector.numpy() for vector in packed(values)]

    def counts_in(self, variable: Any) -> bool:
        """Returns whether a Keras variable is one of a metric of the model."""
        return any(variable is one for one in self._model.metrics_variables)

    def counts_change(self) -> None:
        """Starts from the counts that the metrics hold when the next step ends: the program is about to write them."""
        self._counts_changed = True
        if self._replayed is not None:
            self._replayed.forget()

    def add_result(self, number: int, result: Any) -> tuple[bool, int]:
        """Adds the result of a step; returns whether it had batches, and the worker whose data is exhausted, or -1."""
        sums, logs, worker_data, records = result
        sums = [value.numpy() for value in sums]
        if self._clock is not None:
            self._clock.take(sums)
        if self._counts_changed:
            self._counts_changed = False
            self.resume_counts()
        done, exhausted = (int(value) for value in worker_data[0]) if worker_data else (1, -1)
        if worker_data and records:  # The records of steps with data come first.
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
        return done > 0, exhausted

    def _replay(self, records: list[tf.Tensor]) -> None:
        if self._replayed is None:
            return
        self._replayed.replay(records)
        if not self.logs_are_metrics:  # Later steps may read them.
            self._replayed.store()

    def store(self) -> None:
        """Adds the results of the steps to the metrics of the model."""
        if self._replayed is not None:
            self._replayed.store()
        if self._sums is None or not self.logs_are_metrics:
            return  # The steps have written the metrics.
        variables = self._model.metrics_variables
        replayed = {id(v) for v in self._replayed.variables} if self._replayed is not None else ()
        for variable, value in zip(variables, unpacked(self._sums, variables)):
            if id(variable) not in replayed:
                private_api.raw_variable(variable).assign_add(value)
        self._stored, self._sums = added(self._stored, self._sums), None

    def complete_logs(self) -> None:
        """Updates the last logs, which Keras uses for the epoch, with the metrics after the last step."""
        if not self.logs_are_metrics and isinstance(self.logs, dict) and isinstance(self.returned, dict):
            results = self._model.get_metrics_result()
            named = {name: value for name, value in results.items() if name in self._result_names}
            self.returned.update(with_results(self.logs, named))

    def _results_of(self, sums: list[tf.Tensor]) -> Any:
        state = [] if self._replayed is None else self._replayed.state()
        if self._results is None:
            self._results = tf.function(self._compute_results, autograph=False).get_concrete_function(sums, state)
        return self._results(sums, state)

    def _compute_results(self, sums: list[tf.Tensor], state: list[tf.Tensor]) -> Any:
        variables = self._model.metrics_variables
        mapping = list(zip(variables, unpacked(sums, variables)))
        if self._replayed is not None:
            mapping += zip(self._replayed.variables, state)  # The last value of a variable is used.
        with keras.StatelessScope(state_mapping=mapping):
            return self._model.get_metrics_result()
