"""`LocalSGD`: every worker updates its own copy of the weights, and the copies are averaged every few steps."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.communication.algorithms import rounds
from tfdistkit.communication.reducer import MakeState, Reducer, Wire, times
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_choice, require_integer

_SECONDS = re.compile(r"(\d+(?:\.\d+)?) seconds?$")
# The maximum number of steps of a round that is timed by the clock.
_MOST_STEPS = 1e6


class LocalSGD(Reducer):
    """Averages the weights of the workers every few steps, in place of the gradients in each.

    Between two averages a worker trains on its rows alone: no gradient travels. An average is weighted by the rows that
    each worker has trained on, and holds the variables of the optimizer, too (momentum, EMA), so that after it all
    workers are equal, bit for bit. Weights are also averaged at the end of an epoch, before `evaluate` and `predict`,
    and before a backup or a checkpoint: what those see is the average.

    With `every=1` and plain SGD it is synchronous training.

    Args:
        every: Steps between two averages, or a text such as `"30 seconds"`, by the clock of the chief.
        warmup_steps: The number of synchronous steps at the start (post-local SGD, https://arxiv.org/abs/1808.07217).
        slots: `"average"`, or `"keep"`: what the optimizer keeps for each weight (momentum, gradients to accumulate)
            stays the worker's own, so that less travels. EMA is averaged in any case. Backups then hold the slots of
            all workers, and another number of them resumes with the mean; model files hold those of the chief.

    Raises:
        OptionError: (a ValueError) if an argument is out of range.
        UnsupportedError: (a RuntimeError) in the first step, with a `LossScaleOptimizer`, which would skip steps on
            single workers.
    """

    needs_processes = True
    is_local = True

    def __init__(self, every: int | str = 100, warmup_steps: int = 0, slots: str = "average"):
        self.every = every
        self._period, self._period_s = _parsed(every)
        self.warmup_steps = require_integer("warmup_steps", warmup_steps, at_least=0)
        self.slots = require_choice("slots", slots, ("average", "keep"))
        self._optimizer: Any = None
        # By optimizer: what is averaged.
        self._rounds: weakref.WeakKeyDictionary[Any, _Round] = weakref.WeakKeyDictionary()

    def describe(self) -> str:
        return f"{type(self).__name__}(every={self.every!r}, warmup_steps={self.warmup_steps}, slots={self.slots!r})"

    def check_optimizer(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def build(self, variables: list[Any], make_state: MakeState) -> list[Any] | None:
        if not variables:
            return None
        counters = {
            name: make_state(variables[0], f"local_{name}", shape=(), dtype=dtype, saved=False)
            for name, dtype in (("steps", "int64"), ("total", "int64"), ("period", "int64"), ("since", "float64"))
        }
        rows = make_state(variables[0], "local_rows", shape=(), dtype="float32", of_replica=True)
        outer = self.build_outer(variables, make_state)
        made = _Round(weakref.ref(self._optimizer), list(variables), rows, counters, outer)
        self._rounds[self._optimizer] = made
        return [made] * len(variables)

    def build_outer(self, variables: list[Any], make_state: MakeState) -> list[Any]:
        """Makes the state that is kept between averages, for each variable.

        Args:
            variables: The variables that the optimizer updates.
            make_state: As for `build`.
        """
        return []

    def begin_round(self, current: _Round) -> None:
        """Called before the first local step after an average.

        Args:
            current: The variables, equal on all replicas.
        """

    def outer_step(self, current: _Round, averages: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the new values of the variables.

        Args:
            current: The variables, of this replica alone.
            averages: Their averages over the replicas.
        """
        return averages

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        current: _Round = state[0]
        self.begin_round(current)
        if wire.is_local_step:
            return gradients
        # A part is the gradient of this replica's rows times its share of all rows.
        alone = [times(g, tf.math.divide_no_nan(tf.constant(1.0, tf.float64), wire.share)) for g in gradients]
        return self.after_warmup(current, gradients, wire, lambda: alone)

    def after_warmup(
        self, current: _Round, gradients: list[Any], wire: Wire, alone: Callable[[], list[Any]]
    ) -> list[Any]:
        """Returns the gradients of the global batch in the first `warmup_steps`, then those of `alone`.

        Args:
            current: The variables.
            gradients: This replica's parts.
            wire: The collectives.
            alone: Returns the gradients to apply after the warm-up, in the same structure.
        """
        if not self.warmup_steps:
            return alone()
        flat = tf.cond(
            current.total < self.warmup_steps,
            lambda: tf.nest.flatten(wire.sum(gradients), expand_composites=True),
            lambda: [tf.identity(t) for t in tf.nest.flatten(alone(), expand_composites=True)],
        )
        return list(tf.nest.pack_sequence_as(gradients, tf.nest.flatten(flat), expand_composites=True))

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        current: _Round = state[0]
        total = current.add("total", 1)
        is_local = tf.cast(total > self.warmup_steps, tf.int64)
        current.rows.assign(current.rows + wire.rows * tf.cast(is_local, tf.float32))
        steps = current.add("steps", is_local)
        period = tf.maximum(tf.convert_to_tensor(current.counters["period"]), self._period)
        tf.cond(steps >= period, lambda: self._average(current, wire), lambda: False)

    def trains_alone(self) -> bool:
        if not self.warmup_steps:
            return True
        totals = [one.count("total") for one in self._rounds.values()]
        return bool(totals) and min(totals) >= self.warmup_steps

    def own_slots(self, optimizer: Any) -> list[Any]:
        current = self._rounds.get(optimizer)
        if self.slots == "average" or current is None:
            return []
        averaged = {id(one) for one in self._averaged(current)}
        return [one for one in current.slots() if id(one) not in averaged]

    def _averaged(self, current: _Round) -> list[Any]:
        slots = current.slots()
        return slots if self.slots == "average" else [one for one in slots if one.path in current.paths_of_ema()]

    def unsettled(self) -> list[Any]:
        return [one for one in self._rounds.values() if one.count("steps")]

    def settle(self, what: Any, wire: Wire) -> None:
        self._average(what, wire)

    def _average(self, current: _Round, wire: Wire) -> bool:
        slots = self._averaged(current)
        values = [tf.convert_to_tensor(v) for v in (*current.variables, *slots)]
        rows = tf.cast(current.rows, tf.float64)
        # The clock is the chief's: the others add zeros.
        is_chief = tf.cast(tf.equal(wire.replica_id, 0), tf.float64)
        own = tf.stack([rows, *(is_chief * one for one in self._clock(current))])
        sums = wire.sum([rounds.times_rows(v, rows) for v in values] + [own])
        all_rows = sums[-1][0]
        averages = [rounds.mean_over_rows(s, all_rows, value) for s, value in zip(sums, values)]
        count = len(current.variables)
        for variable, new in zip(current.variables, self.outer_step(current, averages[:count])):
            variable.assign(new)
        for variable, new in zip(slots, averages[count:]):
            variable.assign(new)
        current.counters["period"].assign(tf.cast(tf.round(sums[-1][1]), tf.int64))
        current.counters["since"].assign(sums[-1][2])
        current.counters["steps"].assign(tf.zeros([], tf.int64))
        current.rows.assign(tf.zeros([], tf.float32))
        wire.on_average()
        return True

    def _clock(self, current: _Round) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the steps until the next average by the clock, and the time; zeros where steps count."""
        if self._period_s is None:
            return tf.zeros([], tf.float64), tf.zeros([], tf.float64)
        now, since = tf.timestamp(), tf.convert_to_tensor(current.counters["since"])
        step_s = (now - since) / tf.cast(tf.maximum(current.steps, 1), tf.float64)
        steps = tf.clip_by_value(tf.round(self._period_s / tf.maximum(step_s, 1e-6)), 1.0, _MOST_STEPS)
        # The first round, which holds the tracing, has one step.
        return tf.where(since > 0, steps, tf.ones_like(steps)), now


class _Round:
    """The state of a round of averaging for one optimizer.

    Args:
        optimizer: A weak reference to it.
        variables: The variables that it updates.
        rows: The rows since the last average.
        counters: Steps since the last average, steps in all, steps of a round by the clock, when it began.
        outer: The result of `build_outer`.

    Attributes:
        apart: Further variables of the optimizer that are not averaged.
    """

    def __init__(self, optimizer: Any, variables: list[Any], rows: Any, counters: dict[str, Any], outer: list[Any]):
        self._optimizer, self.variables, self.rows = optimizer, variables, rows
        self.counters, self.outer = counters, outer
        self.apart: list[Any] = []

    def slots(self) -> list[Any]:
        """Returns the optimizer's own variables of floating-point numbers: momentum, EMA, accumulated gradients."""
        ours = {id(one) for one in [*tf.nest.flatten(self.outer), *self.apart]}
        # Not counts or rates: these are scalars. (The slots of a scalar weight are scalars, too.)
        own = [v for v in self._optimizer().variables if len(v.shape) or getattr(v, "tfdistkit_is_slot", False)]
        return [v for v in own if id(v) not in ours and "float" in keras.backend.standardize_dtype(v.dtype)]

    def paths_of_ema(self) -> set[str]:
        """Returns the paths of the moving averages of weights (EMA) that the optimizer keeps."""
        optimizer = self._optimizer()
        names = {f"{v.path.replace('/', '_')}_average" for v in self.variables if optimizer.use_ema}
        return {v.path for v in optimizer.variables if v.path.rpartition("/")[2] in names}

    @property
    def steps(self) -> tf.Tensor:
        """The steps since the last average."""
        return tf.convert_to_tensor(self.counters["steps"])

    @property
    def total(self) -> tf.Tensor:
        """The total number of steps."""
        return tf.convert_to_tensor(self.counters["total"])

    def count(self, name: str) -> int:
        """Returns a count, outside of graphs; 0 while a function is traced that builds the optimizer."""
        counter = self.counters[name].value
        return int(counter.numpy()) if counter.is_initialized() else 0

    def add(self, name: str, more: Any) -> tf.Tensor:
        """Counts; returns the new count."""
        new = tf.convert_to_tensor(self.counters[name]) + tf.cast(more, tf.int64)
        self.counters[name].assign(new)
        return new


def _parsed(every: Any) -> tuple[int, float | None]:
    """Returns the steps of a round, and its seconds if the clock counts."""
    if not isinstance(every, str):
        return require_integer("every", every, at_most=2**31 - 1), None
    found = _SECONDS.match(every.strip())
    if found is None or not float(found[1]):
        raise OptionError(
            explain('`every` must be a number of steps, or a text such as "30 seconds".', received=f"every={every!r}")
        )
    return 1, float(found[1])
