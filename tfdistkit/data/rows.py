"""The rows of a batch: their number, the rows of each part, and tensors whose number of rows differs."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import is_same_for_all_rows, paths_of
from tfdistkit.errors import OptionError, explain

# Start and end marks of the message of an assertion on numbers of rows, from which `rows_error` reads them.
_FOUND, _FOUND_IN_RUN, _END = "(rows differ)", "(rows of arguments differ)", "(end)"


def rows_of(total: Any, parts: int, index: Any) -> tuple[Any, Any]:
    """Returns the rows of one part of a batch: consecutive ones, in the order of the parts.

    The parts differ by at most one row, the larger ones first: 10 rows in 4 parts are 3, 3, 2, 2.

    Args:
        total: Rows of the batch, an int or a scalar int32 tensor.
        parts: The number of parts.
        index: The part, from 0; an int or a scalar int32 tensor.

    Returns:
        The index of the first row, and the number of rows; ints if `total` and `index` are.
    """
    each, more = total // parts, total % parts
    if isinstance(total, int) and isinstance(index, int):
        return index * each + min(index, more), each + (index < more)
    return index * each + tf.minimum(index, more), each + tf.cast(tf.less(index, more), tf.int32)


def count_rows(value: Any) -> tuple[Any, int | None] | None:
    """Returns the length of a tensor's first dimension.

    Args:
        value: A tensor (dense, ragged or sparse), or any other value.

    Returns:
        The rows as a scalar int32 tensor or int, and as an int if known while tracing. None without a first dimension.
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
    """Selects the tensors of a batch that are split into parts, and checks that their rows are equal.

    Args:
        element_spec: The element spec of the batches.
        marks: The marks of their dataset.

    Attributes:
        same_for_all_rows: The places of the tensors that are marked as such, in the flat element spec.

    Raises:
        OptionError: if static shapes have different numbers of rows.
    """

    def __init__(self, element_spec: Any, marks: list[str] | None = None):
        leaves = list(zip(paths_of(element_spec), tf.nest.flatten(element_spec)))
        is_marked = [is_same_for_all_rows(path, marks or []) for path, _ in leaves]
        self.same_for_all_rows = [place for place, marked in enumerate(is_marked) if marked]
        self._cut = [_has_rows(spec) and not marked for (_, spec), marked in zip(leaves, is_marked)]
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
        """Whether a tensor can be split."""
        return any(self._cut)

    def rows(self, batch: Any) -> Any:
        """Returns the rows of a batch: an int if static, else a scalar int32 tensor.

        Args:
            batch: Tensors in the structure of the element spec. If their rows differ at run time, an assertion fails
                with a message that `rows_error` reads.
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
        """Replaces each tensor that is split by `take(value)`."""
        values = [take(value) if cut else value for value, cut in zip(tf.nest.flatten(batch), self._cut)]
        return tf.nest.pack_sequence_as(batch, values)


def assert_same(counts: list[Any]) -> tf.Operation | None:
    """Returns an assertion that numbers of rows are equal; `rows_error` reads its message.

    Args:
        counts: Scalar int32 tensors, or ints.
    """
    numbers = tf.stack(counts)
    are_same = tf.reduce_all(tf.equal(numbers, numbers[0]))
    return tf.debugging.Assert(are_same, [_FOUND_IN_RUN, numbers, _END])


def which_is_the_batch(received: str) -> OptionError:
    """Returns the error for arguments of `strategy.run` whose numbers of rows differ.

    Args:
        received: The numbers of rows.
    """
    return OptionError(
        explain(
            "All tensors in the arguments of `strategy.run` must have the rows of the batch: this replica's weight in "
            "losses and layer state comes from them.",
            received=f"tensors of {received} rows",
            do="Let the function capture other tensors (a seed, a table) instead of taking them as arguments; or pass "
            "the elements of `strategy.distribute_batches(dataset)`.",
        )
    )


def rows_error(message: str) -> OptionError | None:
    """Returns the error of a step that failed for its rows; None if the message comes from another operation.

    Args:
        message: TensorFlow's message for a failed operation.
    """
    for sign, error in ((_FOUND, rows_differ), (_FOUND_IN_RUN, which_is_the_batch)):
        _, found, rest = message.partition(f"[{sign}]")
        if found:
            return error(" ".join(re.split(r"[\[\] ]+", rest.partition(f"[{_END}]")[0])).strip())
    missing = re.search(r"slice index -?\d+ of dimension 0 out of bounds", message)
    return None if missing is None else _has_no_row(missing[0])


def _has_no_row(received: str) -> OptionError:
    """Returns the error for a step that takes a row by its number (`batch[1]`), which a replica does not have."""
    return OptionError(
        explain(
            "A step must not take a row of the batch by its number: a replica gets a part of the rows, perhaps one.",
            received=received,
            do="If the first dimension holds no rows (an anchor and a positive), make a tuple of tensors: "
            "`dataset.map(lambda x: (x[0], x[1]))`. Name tensors that every replica gets whole in "
            "`tfdistkit.data.same_for_all_rows(dataset, ...)`.",
        )
    )


def rows_differ(received: str) -> OptionError:
    """Returns the error for a batch whose tensors have different numbers of rows.

    Args:
        received: The rows of each tensor.
    """
    return OptionError(
        explain(
            "All tensors of a batch, except scalars, must have the same number of rows: each replica gets a part of "
            "them.",
            received=received,
            do="Pad tensors of other lengths, or make each a tf.RaggedTensor with one row per example; name tensors "
            "that every replica gets whole in `tfdistkit.data.same_for_all_rows(dataset, ...)`; or give each replica "
            "its own batches (`strategy.distribute_datasets_from_function`).",
        )
    )


def _has_rows(spec: Any) -> bool:
    shape = getattr(spec, "shape", None)
    return shape is not None and hasattr(spec, "dtype") and tf.TensorShape(shape).rank != 0
