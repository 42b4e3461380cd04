"""Collectives with gradients, the same over every transport.

The gradient of a rank's input is that of the sum of all ranks' losses. So the gradient of a gather is the sum of the
upstream gradients of all ranks, sliced to the rank's own rows.

In a Keras step the loss is the mean of the ranks' losses, weighted by rows, and each rank's gradients are weighted when
they are averaged. A gradient that crosses ranks is multiplied by the weight of the rank that it leaves, and divided by
the weight of the rank where it arrives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.collectives.communicators import Communicator

# Returns the weight that this rank's gradients will get, or None; set by the strategies.
_find_share: Callable[[], Any] = lambda: None  # noqa: E731
# Returns what this rank adds to a sum: zeros in place of a tensor of a placeholder row; set by the strategies.
_part_of_sum: Callable[[tf.Tensor], tf.Tensor] = lambda tensor: tensor  # noqa: E731
# Returns what this rank adds to a gather: no row in place of a placeholder row; set by the strategies.
_own_rows: Callable[[tf.Tensor], tf.Tensor] = lambda tensor: tensor  # noqa: E731
# Called with the number of ranks and each result that is the same on all of them; set by the strategies.
_note_same: Callable[[int, tf.Tensor], None] = lambda ranks, tensor: None  # noqa: E731


# Collectives with the same result on all ranks.
_SAME_ON_ALL = ("summed", "extreme", "gathered", "broadcasted")


def weigh_ranks_by(
    find_share: Callable[[], Any],
    part_of_sum: Callable[[tf.Tensor], tf.Tensor],
    own_rows: Callable[[tf.Tensor], tf.Tensor],
    note_same: Callable[[int, tf.Tensor], None],
) -> None:
    """Sets the functions that return what this rank weighs, and that notes what is the same on all ranks.

    Args:
        find_share: Returns the weight of this rank's gradients, a scalar tensor or number; None if they are summed.
        part_of_sum: Returns what this rank adds to a sum in place of a tensor: zeros if it holds a placeholder row.
        own_rows: Returns what this rank adds to a gather in place of a tensor: no row for a placeholder row.
        note_same: Called with the number of ranks, and each result that is the same on all of them.
    """
    global _find_share, _part_of_sum, _own_rows, _note_same
    _find_share, _part_of_sum, _own_rows, _note_same = find_share, part_of_sum, own_rows, note_same


def own_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what this rank adds to a gather in place of a tensor: no row for a placeholder row."""
    return _own_rows(tensor)


def with_gradient_times(value: Any, factor: Any) -> Any:
    """Returns a tensor unchanged, and multiplies its gradient.

    Args:
        value: A tensor; returned as it is if it is not floating-point.
        factor: A scalar tensor or number.
    """
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

    return forward(value)


def _weighted(collective: Callable[..., Any]) -> Any:
    @functools.wraps(collective)
    def wrapper(communicator: Communicator, value: Any, *args: Any) -> Any:
        result = weighted(communicator, value, *args)
        if collective.__name__ in _SAME_ON_ALL:
            tf.nest.map_structure(functools.partial(_note_same, communicator.size), result)
        return result

    def weighted(communicator: Communicator, value: Any, *args: Any) -> Any:
        share = _find_share()
        if share is None:
            return collective(communicator, value, *args)
        inverse = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), tf.cast(share, tf.float64))
        value = tf.nest.map_structure(lambda v: with_gradient_times(v, inverse), value)
        result = collective(communicator, value, *args)
        return tf.nest.map_structure(lambda v: with_gradient_times(v, share), result)

    return wrapper


@_weighted
def summed(communicator: Communicator, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over the ranks. The gradient is the sum of the gradients of all ranks."""
    tensors = [_part_of_sum(t) for t in tensors]
    if not all(t.dtype.is_floating for t in tensors):
        return _summed_mixed(communicator, tensors)

    @tf.custom_gradient
    def forward(*values: tf.Tensor) -> Any:
        return communicator.sum(list(values)), lambda *upstream: summed.__wrapped__(communicator, list(upstream))

    return list(forward(*tensors))


def _summed_mixed(communicator: Communicator, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums floating-point tensors with gradients, and integers, which have none, without."""
    results = list(tensors)
    for floating in (True, False):
        group = [i for i, t in enumerate(tensors) if t.dtype.is_floating == floating]
        values = [tensors[i] for i in group]
        if values:
            values = summed.__wrapped__(communicator, values) if floating else communicator.sum(values)
        for i, value in zip(group, values):
            results[i] = value
    return results


@_weighted
def extreme(communicator: Communicator, tensor: tf.Tensor, op: str) -> tf.Tensor:
    """Returns the minimum or maximum over the ranks. Ranks that hold the value share the gradient equally."""

    @tf.custom_gradient
    def forward(value: tf.Tensor) -> Any:
        result = communicator.extreme(value, op)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            holds_it = tf.cast(value == result, upstream.dtype)
            total, ranks = summed.__wrapped__(communicator, [upstream, holds_it])
            return tf.math.divide_no_nan(total * holds_it, ranks)

        return result, gradient

    return forward(tensor)


@_weighted
def gathered(communicator: Communicator, tensor: tf.Tensor) -> tf.Tensor:
    """Concatenates along axis 0. The gradient is the sum of the gradients of all ranks, sliced to the own rows."""

    @tf.custom_gradient
    def forward(value: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            [total] = summed.__wrapped__(communicator, [upstream])
            first, _ = communicator.row_offset(value)
            return total[first : first + tf.shape(value)[0]]

        return communicator.gather(value), gradient

    result = forward(tensor)
    result.set_shape([None, *tensor.shape[1:]])
    return result


@_weighted
def broadcasted(communicator: Communicator, tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
    """Returns the root's tensor. The gradient is the sum over all ranks on the root, and zero elsewhere."""

    @tf.custom_gradient
    def forward(value: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            [total] = summed.__wrapped__(communicator, [upstream])
            return tf.where(communicator.rank() == root_rank, total, tf.zeros_like(total))

        return communicator.broadcast(value, root_rank), gradient

    return forward(tensor)


@_weighted
def reduce_scattered(communicator: Communicator, tensor: tf.Tensor) -> tf.Tensor:
    """Sums, and returns this rank's share of the rows. The gradient is the gather of all ranks' gradients."""

    @tf.custom_gradient
    def forward(value: tf.Tensor) -> Any:
        return communicator.reduce_scatter(value), lambda upstream: gathered.__wrapped__(communicator, upstream)

    result = forward(tensor)
    result.set_shape([None, *tensor.shape[1:]])
    return result


@_weighted
def exchanged(communicator: Communicator, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends each rank its rows. The gradient sends the gradients of the rows back to their senders."""

    @tf.custom_gradient
    def forward(value: tf.Tensor) -> Any:
        result, received = communicator.all_to_all(value, splits)

        def gradient(upstream: tf.Tensor, _: Any) -> tf.Tensor:
            return exchanged.__wrapped__(communicator, upstream, received)[0]

        return (result, received), gradient

    result, received = forward(tensor)
    result.set_shape([None, *tensor.shape[1:]])
    return result, received
