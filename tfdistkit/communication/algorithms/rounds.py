"""Code that the algorithms share: counting local steps, averages weighted by rows, and their compression."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.named import COMPRESSIONS, chosen_reducer
from tfdistkit.communication.reducer import MakeState, Reducer, Wire
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.validation import require_choice


def count_step(current: Any, wire: Wire, warmup_steps: int = 0) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts a step.

    Args:
        current: The result of `LocalSGD.build`: its counters and rows.
        wire: The collectives, with the rows of this step.
        warmup_steps: The number of synchronous steps at the start.

    Returns:
        The local steps since all replicas were equal, and the rows of this one if it is local; scalar tensors.
    """
    is_local = tf.cast(current.add("total", 1) > warmup_steps, tf.int64)
    rows = wire.rows * tf.cast(is_local, tf.float32)
    current.rows.assign(current.rows + rows)
    return current.add("steps", is_local), rows


def share_of(rows: tf.Tensor, all_rows: tf.Tensor) -> tf.Tensor:
    """Returns this replica's share of the rows of all; 0 where no replica has a row."""
    return tf.math.divide_no_nan(tf.cast(rows, tf.float64), tf.cast(all_rows, tf.float64))


def times_rows(value: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns a value times a number of rows, for `mean_over_rows`.

    A narrow float becomes float32: float16 ends at 65504, and bfloat16 has no 257.

    Args:
        value: A tensor of any numeric dtype.
        rows: A scalar tensor.
    """
    wide = tf.float32 if value.dtype.is_floating and value.dtype.size < 4 else value.dtype
    return tf.cast(value, wide) * tf.cast(rows, wide)


def mean_over_rows(total: tf.Tensor, rows: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns a mean, weighted by rows, in the dtype of the values.

    Args:
        total: The sum of `times_rows` over the replicas.
        rows: The sum of their rows.
        value: The value of this replica, which stays where no replica has a row.
    """
    return tf.where(rows > 0, tf.cast(total / tf.cast(rows, total.dtype), value.dtype), value)


def average_slots(current: Any, slots: list[Any], wire: Wire) -> None:
    """Averages some of the optimizer's own variables over the replicas, and ends the round.

    Args:
        current: As in `count_step`. Its variables are equal already.
        slots: What to average.
        wire: The collectives.
    """
    values = [tf.convert_to_tensor(slot) for slot in slots]
    rows = tf.convert_to_tensor(current.rows)
    sums = wire.sum([*(times_rows(value, rows) for value in values), rows])
    for slot, value, total in zip(slots, values, sums):
        slot.assign(mean_over_rows(total, sums[-1], value))
    current.counters["steps"].assign(tf.zeros([], tf.int64))
    current.rows.assign(tf.zeros([], tf.float32))


def required_compression(compression: Any, algorithm: str, option: str = "compression") -> Reducer | None:
    """Returns the compression of an algorithm; None for none.

    Args:
        compression: A name, an object of `tfdistkit.compression`, or None.
        algorithm: The name of the algorithm.
        option: The name of its option.

    Raises:
        OptionError: for anything else.
    """
    if option != "compression" and not isinstance(compression, (Reducer, type(None))):
        require_choice(option, compression, tuple(COMPRESSIONS))
    if isinstance(compression, Reducer) and compression.is_local:
        raise OptionError(
            explain(
                f"`{option}` of {algorithm} must not be an algorithm itself.",
                received=f"{option}={compression.describe()}",
                expected="an object of `tfdistkit.compression`, such as tfdistkit.compression.ByteGrad()",
            )
        )
    return chosen_reducer("none" if compression is None else compression, None)


def choices_of(own: str, compression: Reducer | None, variables: list[Any]) -> list[str]:
    """Returns, for each variable, what an algorithm and its compression do with it (`Reducer.choices`).

    Args:
        own: The description of the algorithm.
        compression: Its compression.
        variables: The variables.
    """
    if compression is None:
        return [own] * len(variables)
    return [f"{own} by {choice}" for choice in compression.choices(variables)]


def build_compression(compression: Reducer | None, variables: list[Any], make_state: MakeState) -> list[Any]:
    """Makes the state of a compression for each variable; None where it keeps none."""
    made = None if compression is None else compression.build(variables, make_state)
    return made or [None] * len(variables)


def sum_parts(
    compression: Reducer | None, parts: list[tf.Tensor], variables: list[Any], state: list[Any], wire: Wire
) -> list[tf.Tensor]:
    """Sums tensors over the replicas as a compression sends them, the same bits on all of them."""
    return wire.sum(parts) if compression is None else compression.reduce(parts, variables, state, wire)


def require_no_optimizer(compression: Reducer | None, algorithm: str) -> None:
    """Refuses a compression with a momentum or clipping of its own, which are for gradients.

    Args:
        compression: The compression.
        algorithm: The name of the algorithm.

    Raises:
        UnsupportedError: for such a compression.
    """
    if compression is not None and compression.replaces_optimizer:
        raise UnsupportedError(
            explain(
                f"{algorithm} sends changes of weights, which have the optimizer's momentum already.",
                received=f"compression={compression.describe()}",
                do="Leave `momentum` and `clip_norm` out of the compression.",
            )
        )
