"""Collectives on tensors for user code: validate arguments, cast dtypes, compare ranks, differentiate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdistkit.collectives import differentiable, registry
from tfdistkit.collectives.carriers import CARRIERS
from tfdistkit.collectives.communicators import Communicator
from tfdistkit.collectives.mismatches import compared
from tfdistkit.collectives.process_sets import ProcessSet
from tfdistkit.collectives.resolve import communicator, explained
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_choice, require_integer

_OPS = ("sum", "average", "min", "max")

# Dtypes that TensorFlow and Horovod both sum.
_CARRIED = {tf.float16, tf.float32, tf.float64, tf.int32, tf.int64}


@explained
def all_reduce(tensor: Any, op: str = "sum", process_set: ProcessSet | None = None) -> tf.Tensor:
    """Reduces a tensor over all ranks: its sum, average, minimum or maximum.

    Differentiable: the gradient of a sum is the sum of the gradients of all ranks.

    Args:
        tensor: A number, array, tensor or variable, of the same dtype and shape on every rank.
        op: `"sum"`, `"average"` (rounded down for integers), `"min"` or `"max"` (for booleans: all, any).
            Over TensorFlow's collectives, `"min"` and `"max"` gather the tensors of all ranks.
        process_set: The ranks that take part. Default: all. Horovod only.

    Returns:
        The result, the same on every rank.

    Raises:
        OptionError: (a ValueError) if `op` is unknown, or the tensor cannot be sent; in eager mode also if the
            ranks call with different shapes or dtypes (in a graph that is a `tf.errors.InvalidArgumentError`).
        UnsupportedError: (a RuntimeError) if the other ranks cannot be reached from this call.
    """
    return _reduce([_tensor(tensor)], op, process_set)[0]


@explained
def grouped_all_reduce(
    tensors: Sequence[Any], op: str = "sum", process_set: ProcessSet | None = None
) -> list[tf.Tensor]:
    """Reduces several tensors over all ranks, those of a dtype in one operation.

    Args:
        tensors: Tensors as `all_reduce` takes them, in the same order on every rank.
        op: `"sum"`, `"average"`, `"min"` or `"max"`.
        process_set: The ranks that take part. Default: all. Horovod only.

    Returns:
        The results, in the same order.

    Raises:
        OptionError: (a ValueError) as `all_reduce`.
        UnsupportedError: (a RuntimeError) as `all_reduce`.
    """
    if isinstance(tensors, (tf.Tensor, tf.Variable, Mapping)) or not isinstance(tensors, Iterable):
        raise OptionError(
            explain(
                "`tensors` must be a list of tensors.",
                received=f"a {type(tensors).__name__}",
                do="Call `all_reduce` for one tensor. Give the values of a dict in the same order on every rank.",
            )
        )
    return _reduce([_tensor(t) for t in tensors], op, process_set)


@explained
def all_gather(tensor: Any, axis: int = 0, process_set: ProcessSet | None = None) -> tf.Tensor:
    """Concatenates the tensors of all ranks, in the order of the ranks.

    Differentiable: for losses over the whole global batch, such as contrastive ones. The gradient of a rank's
    rows is the sum of their gradients over the losses of all ranks.

    Args:
        tensor: A tensor of the same dtype on every rank, and of the same shape but for its length along
            `axis`. Scalars make a vector.
        axis: The axis to concatenate along; counted from the end if negative.
        process_set: The ranks that take part. Default: all. Horovod only.

    Returns:
        The concatenation, the same on every rank.

    Raises:
        OptionError: (a ValueError) if `axis` is out of range, or the tensor cannot be sent; in eager mode also if the
            ranks call with different dtypes or shapes (in a graph that is a `tf.errors.InvalidArgumentError`).
        UnsupportedError: (a RuntimeError) if the other ranks cannot be reached from this call.
    """
    tensor = _tensor(tensor)
    if tensor.shape.rank == 0:
        tensor = tensor[None]
    axis = _axis(axis, tensor)
    between = communicator(process_set)
    if between.size == 1:
        return tf.identity(tensor)
    [tensor] = _compared(between, process_set, f"all_gather axis={axis}", [tensor], axis)
    swap = list(range(tensor.shape.rank))
    swap[0], swap[axis] = swap[axis], swap[0]
    carried = tf.transpose(_carried(tensor), swap) if axis else differentiable.own_rows(_carried(tensor))
    gathered = differentiable.gathered(between, carried)
    return tf.cast(tf.transpose(gathered, swap) if axis else gathered, tensor.dtype)


@explained
def broadcast(tensor: Any, root_rank: int = 0, process_set: ProcessSet | None = None) -> tf.Tensor:
    """Broadcasts a tensor from one rank to all.

    Differentiable: the gradient of the root's tensor is the sum of the gradients of all ranks.

    Args:
        tensor: A tensor of the same dtype and shape on every rank; only the values on `root_rank` are used.
        root_rank: The rank that sends; counted within `process_set` if one is given.
        process_set: The ranks that take part. Default: all. Horovod only.

    Returns:
        The tensor of `root_rank`.

    Raises:
        OptionError: (a ValueError) if `root_rank` is out of range, or the tensor cannot be sent; in eager mode also if
            the ranks call with different dtypes or shapes (in a graph that is a `tf.errors.InvalidArgumentError`).
        UnsupportedError: (a RuntimeError) if the other ranks cannot be reached from this call.
    """
    tensor = _tensor(tensor)
    between = communicator(process_set)
    root_rank = require_rank(root_rank, between.size)
    if between.size == 1:
        return tf.identity(tensor)
    [tensor] = _compared(between, process_set, f"broadcast root_rank={root_rank}", [tensor])
    return tf.cast(differentiable.broadcasted(between, _carried(tensor), root_rank), tensor.dtype)


@explained
def reduce_scatter(tensor: Any, op: str = "sum", process_set: ProcessSet | None = None) -> tf.Tensor:
    """Reduces a tensor over all ranks, and returns to each rank its share of the rows.

    Over TensorFlow's collectives, and for `"min"` and `"max"`, this is an `all_reduce` followed by a slice.

    Args:
        tensor: A tensor of at least one dimension, of the same dtype and shape on every rank.
        op: `"sum"`, `"average"`, `"min"` or `"max"`.
        process_set: The ranks that take part. Default: all. Horovod only.

    Returns:
        The rows of this rank: rank 0 has the first. The first ranks get one more where the rows do not divide evenly.

    Raises:
        OptionError: (a ValueError) as `all_reduce`, and if the tensor is a scalar.
        UnsupportedError: (a RuntimeError) as `all_reduce`.
    """
    tensor = _with_rows(_tensor(tensor))
    op = _op(op, [tensor])
    between = communicator(process_set)
    if between.size == 1:
        return tf.identity(tensor)
    registry.sums.note()
    [tensor] = _compared(between, process_set, f"reduce_scatter {op}", [tensor])
    if op in ("min", "max"):
        result = between.own_share(differentiable.extreme(between, _carried(tensor), op))
    else:
        result = differentiable.reduce_scattered(between, _carried(tensor))
    return tf.cast(_divided(result, between.size) if op == "average" else result, tensor.dtype)


@explained
def all_to_all(tensor: Any, splits: Any = None, process_set: ProcessSet | None = None) -> Any:
    """Sends some rows to each rank, and receives some from each.

    Over TensorFlow's collectives, every rank receives the rows of all ranks and keeps those sent to it.

    Args:
        tensor: A tensor of at least one dimension, of the same dtype on every rank, and of the same shape but for
            its first dimension.
        splits: How many rows go to each rank, in rank order; they may differ from rank to rank, and must sum to
            the number of rows of `tensor`. Default: the same number to each.
        process_set: The ranks that take part. Default: all. Horovod only.

    Returns:
        The received rows, in rank order. With `splits`, a tuple of them and of how many came from each rank.

    Raises:
        OptionError: (a ValueError) if `splits` is wrong, or the rows do not divide; in eager mode also if the ranks
            call with different dtypes or shapes (in a graph that is a `tf.errors.InvalidArgumentError`).
        UnsupportedError: (a RuntimeError) if the other ranks cannot be reached from this call.
    """
    tensor = _with_rows(_tensor(tensor))
    between = communicator(process_set)
    rows = _splits(splits, tensor, between.size)
    if between.size == 1:
        return tf.identity(tensor) if splits is None else (tf.identity(tensor), rows)
    [tensor] = _compared(between, process_set, "all_to_all", [tensor], 0)
    result, received = differentiable.exchanged(between, _carried(tensor), rows)
    result = tf.cast(result, tensor.dtype)
    return result if splits is None else (result, received)


def require_rank(root_rank: int, size: int) -> int:
    """Returns `root_rank` as an int.

    Raises:
        OptionError: if it is not a rank below `size`.
    """
    return require_integer("root_rank", root_rank, 0, size - 1)


def _reduce(tensors: list[tf.Tensor], op: str, process_set: ProcessSet | None) -> list[tf.Tensor]:
    op = _op(op, tensors)
    between = communicator(process_set)
    if between.size == 1 or not tensors:
        return [tf.identity(t) for t in tensors]
    registry.sums.note()
    tensors = _compared(between, process_set, f"all_reduce {op}", tensors)
    carried = [_carried(t) for t in tensors]
    if op in ("min", "max"):
        results = [differentiable.extreme(between, t, op) for t in carried]
    else:
        results = differentiable.summed(between, carried)
    if op == "average":
        results = [_divided(r, between.size) for r in results]
    return [tf.cast(r, t.dtype) for r, t in zip(results, tensors)]


def _compared(
    between: Communicator,
    process_set: ProcessSet | None,
    call: str,
    tensors: list[tf.Tensor],
    free_axis: int | None = None,
) -> list[tf.Tensor]:
    last = registry.last_made()
    counts = process_set.calls if process_set is not None else None if last is None else last.calls
    return compared(between, counts, call, tensors, free_axis)


def _tensor(value: Any) -> tf.Tensor:
    """Converts a value to a dense tensor of a dtype that can be sent, with a known number of dimensions."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor, str, bytes)) or (
        isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable)
    ):
        kind = type(value).__name__
        raise OptionError(
            explain("`tensor` must be a dense tensor of one replica, or convertible to one.", received=f"a {kind}")
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise OptionError(
            explain(
                "`tensor` must be convertible to one tensor.",
                received=f"a {type(value).__name__}: {str(error).splitlines()[0].rstrip('.')[:200]}",
                do="For a list of tensors, call `grouped_all_reduce`, or one collective for each.",
            )
        ) from error
    if tensor.dtype not in _CARRIED and tensor.dtype not in CARRIERS:
        names = ", ".join(sorted(d.name for d in {*_CARRIED, *CARRIERS}))
        raise OptionError(
            explain(
                "`tensor` must have a dtype that collectives can send.",
                received=tensor.dtype.name,
                expected=f"one of: {names}",
            )
        )
    if tensor.shape.rank is None:
        raise OptionError(explain("`tensor` must have a known number of dimensions.", do="Call its `set_shape` first."))
    return tensor


def _carried(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, CARRIERS.get(tensor.dtype, tensor.dtype))


def _divided(total: tf.Tensor, size: int) -> tf.Tensor:
    return total // size if total.dtype.is_integer else total / size


def _op(op: str, tensors: list[tf.Tensor]) -> str:
    name = require_choice("op", str(op).lower(), _OPS)
    if name in ("sum", "average") and any(t.dtype == tf.bool for t in tensors):
        raise OptionError(
            explain(
                '`op` must be "min" (all) or "max" (any) for a tensor of booleans.',
                received=f"op={op!r}",
                do="To count, cast it first: tf.cast(tensor, tf.int32).",
            )
        )
    return name


def _axis(axis: int, tensor: tf.Tensor) -> int:
    dimensions = int(tensor.shape.rank)
    return require_integer("axis", axis, -dimensions, dimensions - 1) % dimensions


def _with_rows(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.shape.rank == 0:
        raise OptionError(explain("`tensor` must have rows to divide: at least one dimension.", received="a scalar"))
    return tensor


def _splits(splits: Any, tensor: tf.Tensor, size: int) -> tf.Tensor:
    """Returns how many rows go to each rank; validates what is known before anything is sent."""
    rows = tensor.shape[0]
    if splits is None:
        if rows is not None and rows % size:
            raise OptionError(
                explain(
                    "The number of rows of `tensor` must be a multiple of the number of ranks.",
                    received=f"{rows} rows, {size} ranks",
                    do="Give `splits` to send different numbers of rows.",
                )
            )
        return tf.repeat(tf.shape(tensor)[0] // size, size)
    splits = tf.cast(tf.convert_to_tensor(splits), tf.int32)
    known = tf.get_static_value(splits)
    if splits.shape.rank != 1 or splits.shape[0] != size:
        wrong = f"a tensor of shape {splits.shape}"
    elif known is not None and rows is not None and (known.sum() != rows or known.min() < 0):
        wrong = f"{known.tolist()} for {rows} rows"
    else:
        return splits
    raise OptionError(
        explain(f"`splits` must be {size} integers >= 0 that sum to the number of rows of `tensor`.", received=wrong)
    )
