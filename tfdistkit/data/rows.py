"""The rows of a batch: how many there are, which of them a part gets, and tensors that have other rows."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import is_same_for_all_rows, paths_of
from tfdistkit.errors import OptionError, explain

# How the message of an operation begins that found tensors with other rows, and where the message ends.
_FOUND, _FOUND_IN_RUN, _END = "(rows differ)", "(rows of arguments differ)", "(end)"


def rows_of(total: Any, parts: int, index: Any) -> tuple[Any, Any]:
    """Returns which rows of a batch a part gets: consecutive ones, in the order of the parts.

    The parts differ by at most one row, and the first ones are the larger ones: 10 rows in 4 parts are 3, 3, 2, 2.

    Args:
        total: Rows of the batch, an int or a scalar int32 tensor.
        parts: How many parts there are.
        index: Which of them, from 0; an int or a scalar int32 tensor.

    Returns:
        The number of the first row, and how many there are; ints if `total` and `index` are.
    """
    each, more = total // parts, total % parts
    if isinstance(total, int) and isinstance(index, int):
        return index * each + min(index, more), each + (index < more)
    return index * each + tf.minimum(index, more), each + tf.cast(tf.less(index, more), tf.int32)


def count_rows(value: Any) -> tuple[Any, int | None] | None:
    """Returns the length of a tensor's first dimension.

    Args:
        value: A tensor, ragged or sparse ones included, or anything else.

    Returns:
        The rows as a scalar int32 tensor or int, and as an int where they are known while tracing. None if there
        is no first dimension.
    """
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32), value.shape[0]
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32), value.shape[0]
    shape = getattr(value, "shape", None)
    if shape is None or isinstance(value, (tf.Variable, tf.distribute.DistributedValues)):
        return None
    shape = tf.TensorShape(shape)
    if shape.rank == 0:
        return None
    static = shape[0] if shape.rank else None
    return (static if static is not None else tf.shape(value)[0]), static


class Split:
    """Which tensors of a batch are cut into parts, and by how many rows.

    Args:
        element_spec: What the batches look like.
        marks: The marks of their dataset.

    Raises:
        OptionError: if tensors are known to have different numbers of rows.
    """

    def __init__(self, element_spec: Any, marks: list[str] | None = None):
        leaves = list(zip(paths_of(element_spec), tf.nest.flatten(element_spec)))
        self._cut = [_has_rows(spec) and not is_same_for_all_rows(path, marks or []) for path, spec in leaves]
        self._names = ["/".join(path) or "the batch" for path, _ in leaves]
        known = {
            name: spec.shape[0]
            for (_, spec), name, cut in zip(leaves, self._names, self._cut)
            if cut and spec.shape.rank is not None and spec.shape[0] is not None
        }
        if len(set(known.values())) > 1:
            raise rows_differ(", ".join(f"{rows} in `{name}`" for name, rows in known.items()))

    @property
    def is_possible(self) -> bool:
        """Whether there is anything to cut."""
        return any(self._cut)

    def rows(self, batch: Any) -> Any:
        """Returns the rows of a batch: an int where they are known, else a scalar int32 tensor.

        Args:
            batch: Tensors of the structure of the element spec. Where they turn out to have different numbers of
                rows, an operation fails with a message that `rows_error` reads.
        """
        values = zip(self._names, tf.nest.flatten(batch), self._cut)
        counted = [(name, count_rows(value)) for name, value, cut in values if cut]
        known = [(name, count) for name, count in counted if count is not None]
        first_name, (first, first_static) = known[0]
        for name, (_, static) in known[1:]:
            if static is not None and first_static is not None and static != first_static:  # in eager execution
                raise rows_differ(f"{first_static} in `{first_name}`, {static} in `{name}`")
        checks = [
            tf.debugging.Assert(
                tf.equal(rows, first), [_FOUND, first, f"in `{first_name}`,", rows, f"in `{name}`", _END]
            )
            for name, (rows, static) in known[1:]
            if static is None or first_static is None
        ]
        if not any(check is not None for check in checks):  # None in eager execution
            return first
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(first)

    def cut(self, batch: Any, take: Any) -> Any:
        """Returns a batch with `take(value)` in place of each tensor that has rows."""
        values = [take(value) if cut else value for value, cut in zip(tf.nest.flatten(batch), self._cut)]
        return tf.nest.pack_sequence_as(batch, values)


def assert_same(counts: list[Any]) -> tf.Operation | None:
    """Returns an operation that fails with what `rows_error` reads if numbers of rows differ.

    Args:
        counts: Scalar int32 tensors, or ints.
    """
    numbers = tf.stack(counts)
    are_same = tf.reduce_all(tf.equal(numbers, numbers[0]))
    return tf.debugging.Assert(are_same, [_FOUND_IN_RUN, numbers, _END])


def which_is_the_batch(received: str) -> OptionError:
    """Returns the error for a function in `strategy.run` of whose arguments it is not clear which is the batch.

    Args:
        received: The numbers of rows.
    """
    return OptionError(
        explain(
            "The arguments of `strategy.run` have different numbers of rows, so it is not known how much this "
            "replica's part of the batch weighs in a loss or in the state of a layer.",
            received=f"tensors of {received} rows",
            expected="the rows of the batch in every tensor that has a first dimension",
            do="Let the function take other tensors (a seed, a table) from around it, not as arguments; or hand over "
            "the elements of `strategy.distribute_batches(dataset)`.",
        )
    )


def rows_error(message: str) -> OptionError | None:
    """Returns the error of a check in `Split.rows`; None if a message is that of another operation.

    Args:
        message: What TensorFlow says of an operation that failed.
    """
    for sign, error in ((_FOUND, rows_differ), (_FOUND_IN_RUN, which_is_the_batch)):
        _, found, rest = message.partition(f"[{sign}]")
        if found:
            return error(" ".join(re.split(r"[\[\] ]+", rest.partition(f"[{_END}]")[0])).strip())
    return None


def rows_differ(received: str) -> OptionError:
    """Returns the error for a batch whose tensors have different numbers of rows.

    Args:
        received: How many rows which tensor has.
    """
    return OptionError(
        explain(
            "The tensors of a batch have different numbers of rows, so they cannot be cut into parts for the replicas.",
            received=received,
            expected="the batch as the first dimension of every tensor; scalars pass",
            do="Bring tensors of other lengths as tf.RaggedTensor with one row for each example, or padded; name those "
            "that all replicas shall see whole in `tfdistkit.data.same_for_all_rows(dataset, ...)`; or let each "
            "replica bring batches of its own (`strategy.distribute_datasets_from_function`).",
        )
    )


def _has_rows(spec: Any) -> bool:
    shape = getattr(spec, "shape", None)
    return shape is not None and hasattr(spec, "dtype") and tf.TensorShape(shape).rank != 0
