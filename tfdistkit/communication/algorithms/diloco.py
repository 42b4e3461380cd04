"""`DiLoCo`: the changes of the weights in local steps are the gradient of an outer optimizer."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdistkit.communication.algorithms import rounds
from tfdistkit.communication.algorithms.local_sgd import LocalSGD, _Round
from tfdistkit.communication.reducer import MakeState, Wire
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_integer


class DiLoCo(LocalSGD):
    """Works as `LocalSGD`, but an outer SGD takes the change from the last weights to the average as its gradient.

    For long rounds (https://arxiv.org/abs/2311.08105): 500 local steps of AdamW, and an outer Nesterov momentum.

    Args:
        every: As in `LocalSGD`; a number of steps with `compression`, `fragments` or `delay`.
        outer: The `learning_rate`, `momentum` and `nesterov` of the outer optimizer: a dict with some of them, or a
            `keras.optimizers.SGD`. In a job of several processes an optimizer cannot be made before the strategy, so
            pass a dict. Default: a learning rate of 0.7, and a Nesterov momentum of 0.9.
        warmup_steps: As in `LocalSGD`.
        compression: The compression of the outer gradient: a name, or an object of `tfdistkit.compression`.
        fragments: The variables are divided into so many parts of about the same size, which are averaged in turn,
            each `every` steps (Streaming DiLoCo, https://arxiv.org/abs/2501.18512): as many bytes, fewer at a time.
        delay: Workers go on with their own weights for so many steps, before they take over what an average gave.
        mix: With `delay`: the part of its own weights that a worker keeps then.
        slots: As in `LocalSGD`; `"keep"` by default, as in the paper: an average sends the weights alone. With
            `compression`, `fragments` or `delay`, `"average"` averages them only where all workers become equal: at
            the end of an epoch, before `evaluate` and `predict`, and before a backup or a checkpoint, as EMA always is.

    Raises:
        OptionError: (a ValueError) if an argument is out of range; when the optimizer is built, if there are fewer
            variables than `fragments`.
        UnsupportedError: (a RuntimeError) as `LocalSGD`.
    """

    def __init__(
        self,
        every: int | str = 500,
        outer: Any = None,
        warmup_steps: int = 0,
        *,
        compression: Any = None,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.5,
        slots: str = "keep",
    ):
        super().__init__(every, warmup_steps, slots)
        outer = _required_outer(outer)
        self.learning_rate, self.momentum, self.nesterov = outer
        self.compression = rounds.required_compression(compression, type(self).__name__)
        if self.compression is not None:
            self.compression.check_optimizer(outer)
        self.fragments = require_integer("fragments", fragments)
        self.delay = require_integer("delay", delay, at_least=0)
        self.mix = _required_mix(mix)
        self._is_streaming = self.compression is not None or self.fragments > 1 or self.delay > 0
        if self._is_streaming:
            self._require_a_period()

    def _require_a_period(self) -> None:
        received = f"every={self.every!r}, fragments={self.fragments}, delay={self.delay}"
        if isinstance(self.every, str):
            raise OptionError(
                explain("`every` must be an integer with `compression`, `fragments` or `delay`.", received=received)
            )
        if self.fragments > self.every or self.delay >= self.every:
            raise OptionError(
                explain("`fragments` must be at most `every`, and `delay` below `every`.", received=received)
            )

    def describe(self) -> str:
        outer = f"learning_rate={self.learning_rate:g}, momentum={self.momentum:g}, nesterov={self.nesterov}"
        if self._is_streaming:
            compression = None if self.compression is None else self.compression.describe()
            outer += f", compression={compression}, fragments={self.fragments}, delay={self.delay}, mix={self.mix:g}"
        return f"{super().describe()[:-1]}, {outer})"

    def choices(self, variables: list[Any]) -> list[str]:
        return rounds.choices_of(self.describe(), self.compression, variables)

    def build_outer(self, variables: list[Any], make_state: MakeState) -> list[Any]:
        names = ("outer_anchor", "outer_velocity")
        outer: list[Any] = [tuple(make_state(v, name, saved=False) for name in names) for v in variables]
        if not self._is_streaming:
            return outer
        parts = divided(variables, self.fragments)
        states: list[Any] = [None] * len(variables)
        for part in parts:  # Each part has its own count of sums.
            made = rounds.build_compression(self.compression, [variables[i] for i in part], make_state)
            for i, state in zip(part, made):
                states[i] = state
        # Of each part: the rows since its last average, and the step at which what that gave is taken over.
        counts = [
            make_state(variables[0], "outer_rows", shape=(len(parts),), dtype="float32", of_replica=True),
            make_state(variables[0], "outer_due", shape=(len(parts),), dtype="int64", saved=False),
        ]
        return [*((*own, state) for own, state in zip(outer, states)), counts]

    def begin_round(self, current: _Round) -> None:
        # Here, not after the average: the user may have loaded other weights since.
        is_first = tf.equal(current.steps, 0)
        for variable, (anchor, *_) in zip(current.variables, current.outer):
            anchor.assign(tf.where(is_first, tf.convert_to_tensor(variable), tf.convert_to_tensor(anchor)))

    def outer_step(self, current: _Round, averages: list[tf.Tensor]) -> list[tf.Tensor]:
        return [self._moved(anchor, velocity, tf.convert_to_tensor(anchor) - average)
                for average, (anchor, velocity) in zip(averages, current.outer)]  # fmt: skip

    def _moved(self, anchor: Any, velocity: Any, gradient: tf.Tensor, is_real: Any = True) -> tf.Tensor:
        """Takes a step of the outer optimizer; returns the new value."""
        begin, before = tf.convert_to_tensor(anchor), tf.convert_to_tensor(velocity)
        moved = self.momentum * before + gradient
        velocity.assign(tf.where(is_real, moved, before))
        direction = gradient + self.momentum * moved if self.nesterov else moved
        return tf.where(is_real, begin - self.learning_rate * direction, begin)

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        if not self._is_streaming:
            return super().after_apply(variables, state, wire)
        current: _Round = state[0]
        steps, step_rows = rounds.count_step(current, wire, self.warmup_steps)
        rows, due = current.outer[-1]
        rows.assign(rows + step_rows)
        for number, part in enumerate(divided(current.variables, self.fragments)):
            is_due = tf.equal(tf.convert_to_tensor(due)[number], steps) & (steps > 0)
            if self.delay:
                tf.cond(is_due, functools.partial(self._take_over, current, part), lambda: False)
            is_time = tf.equal((steps + number * self._period // self.fragments) % self._period, 0) & (steps > 0)
            tf.cond(is_time, functools.partial(self._outer_round, current, {number: part}, wire), lambda: False)

    def settle(self, what: Any, wire: Wire) -> None:
        if not self._is_streaming:
            return super().settle(what, wire)
        current: _Round = what
        rows, due = current.outer[-1]
        parts = dict(enumerate(divided(current.variables, self.fragments)))
        for number, part in parts.items():
            is_in_flight = tf.convert_to_tensor(due)[number] > current.steps
            tf.cond(is_in_flight, functools.partial(self._take_over, current, part), lambda: False)
        self._outer_round(current, parts, wire)
        for part in parts.values() if self.delay else ():
            self._take_over(current, part, keeping=0.0)
        due.assign(tf.zeros_like(tf.convert_to_tensor(due)))
        rounds.average_slots(current, self._averaged(current), wire)

    def _outer_round(self, current: _Round, parts: dict[int, list[int]], wire: Wire) -> bool:
        """Takes an outer step with some parts of the variables, which are taken over now or later.

        Args:
            current: All variables.
            parts: By number: the places of the variables of each.
            wire: The collectives.
        """
        rows, due = current.outer[-1]
        [all_rows] = wire.sum([tf.convert_to_tensor(rows)])
        shares = rounds.share_of(rows, all_rows)
        sums: dict[int, tf.Tensor] = {}
        for number, part in parts.items():
            variables = [current.variables[i] for i in part]
            begins = [tf.convert_to_tensor(current.outer[i][0]) for i in part]
            ways = [begin - tf.convert_to_tensor(v) for begin, v in zip(begins, variables)]
            ways = [way * tf.cast(shares[number], way.dtype) for way in ways]
            states = [current.outer[i][2] for i in part]
            sums.update(zip(part, rounds.sum_parts(self.compression, ways, variables, states, wire)))
        for number, part in parts.items():
            for i in part:
                anchor, velocity, _ = current.outer[i]
                anchor.assign(self._moved(anchor, velocity, sums[i], all_rows[number] > 0))
            if not self.delay:
                self._take_over(current, part, keeping=0.0)
        is_here = tf.constant([number in parts for number in range(self.fragments)])
        rows.assign(tf.where(is_here, 0.0, tf.convert_to_tensor(rows)))
        due.assign(tf.where(is_here, current.steps + self.delay, tf.convert_to_tensor(due)))
        return True

    def _take_over(self, current: _Round, part: list[int], keeping: float | None = None) -> bool:
        """Moves variables to the weights of the outer optimizer, except for the part that a worker keeps (`mix`)."""
        keeping = self.mix if keeping is None else keeping
        for i in part:
            variable, anchor = current.variables[i], tf.convert_to_tensor(current.outer[i][0])
            own = tf.convert_to_tensor(variable)
            variable.assign(keeping * own + (1.0 - keeping) * anchor if keeping else anchor)
        return True


class _OuterSGD(NamedTuple):
    """The numbers of an outer optimizer; an optimizer of Keras would start TensorFlow before the strategy does."""

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True


def _required_outer(outer: Any) -> _OuterSGD:
    if outer is None:
        return _OuterSGD()
    if type(outer) is keras.optimizers.SGD:
        return _OuterSGD(float(outer.learning_rate), float(outer.momentum), bool(outer.nesterov))
    if (
        not isinstance(outer, dict)
        or not set(outer) <= set(_OuterSGD._fields)
        or not all(map(_is_number, outer.values()))
    ):
        raise OptionError(
            explain(
                "`outer` must be a keras.optimizers.SGD, or a dict of its numbers.",
                received=f"outer={outer!r}" if isinstance(outer, dict) else f"outer={type(outer).__name__}",
                expected='{"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}, say',
            )
        )
    whole = _OuterSGD(**outer)
    return _OuterSGD(float(whole.learning_rate), float(whole.momentum), bool(whole.nesterov))


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and 0 <= value < math.inf


def divided(variables: list[Any], parts: int) -> list[list[int]]:
    """Divides variables into parts of about the same size; returns their places, in order."""
    if parts > len(variables):
        raise OptionError(
            explain(
                "`fragments` must be at most the number of variables that the optimizer updates.",
                received=f"fragments={parts}, {len(variables)} variables",
            )
        )
    sizes = [math.prod(variable.shape) for variable in variables]
    divided: list[list[int]] = [[] for _ in range(parts)]
    # The largest first, each to the smallest part; an empty part before others, whatever the size.
    for i in sorted(range(len(variables)), key=lambda i: -sizes[i]):
        smallest = min(divided, key=lambda part: (bool(part), sum(sizes[j] for j in part)))
        smallest.append(i)
    return [sorted(part) for part in divided]


def _required_mix(mix: Any) -> float:
    if isinstance(mix, bool) or not isinstance(mix, (int, float)) or not 0 <= mix < 1:
        raise OptionError(explain("`mix` must be at least 0 and below 1.", received=f"mix={mix!r}"))
    return float(mix)
