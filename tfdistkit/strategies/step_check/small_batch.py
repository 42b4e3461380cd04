"""Takes a few rows of a batch for a trial step: some for each replica, and all of them on one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdistkit.data.rows import count_rows, rows_of
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency.row_exchange import table
from tfdistkit.strategies.sync.batch_sharding import KerasPart
from tfdistkit.strategies.sync.gradients.trial import CannotTryError

# Parts of the rows of a replica, in turn: parts of different size show what weighs each replica alike.
_SHARES = (1.0, 0.75)
# Rows of a replica, at most. Their bytes decide in between.
_LEAST_ROWS, _MOST_ROWS = 8, 64
_BYTES_OF_ROWS = 4 << 20
# Bytes of a replica's rows, at most, that are sent to the other processes.
_MOST_BYTES = 16 << 20


class SmallBatch(NamedTuple):
    """A few rows of a batch, as two sets of elements for the replicas of this process.

    Args:
        split: Each replica has some of the rows.
        on_first: The first replica of all has all rows, and the others have none: they hold the same rows, of weight 0.
    """

    split: list[Any]
    on_first: list[Any]


def small_batches(strategy: Any, elements: list[Any]) -> list[SmallBatch]:
    """Takes the first rows of each replica's part of a batch; all ranks call it.

    Args:
        strategy: The strategy.
        elements: The element of each replica of this process.

    Returns:
        The rows in their order and backwards, so that replicas have other rows: one arrangement may hide by chance what
        a step makes of a median, or of the hardest rows.

    Raises:
        CannotTryError: on all ranks, if the rows cannot be taken or sent.
    """
    first = private_api.first_replica_id(strategy)
    given, elements = elements, [_without_same(one) for one in elements]
    most = _most_rows(strategy, elements)
    try:
        parts = [_small(strategy, first + i, one, most) for i, one in enumerate(elements)]
        own, why = [_rows_of_part(one) for one in parts], ""
    except (CannotTryError, tf.errors.OpError, TypeError, ValueError) as error:
        parts, own, why = [], [], str(error)
    if strategy.num_replicas_in_sync > len(elements):
        own = _of_all_ranks(strategy, own, why, data_of(elements[0]))
    elif why:
        raise CannotTryError(why)
    whole = tf.nest.map_structure(lambda *values: _joined(values), *(data for data, rows in own if rows))
    counts = [rows for _, rows in own]
    backwards = _backwards(whole, sum(counts))
    moved = [_with_part(one, backwards, counts, first + i) for i, one in enumerate(parts)]
    arranged = ((parts, whole), (moved, backwards))
    return [
        SmallBatch(
            [_with_same(one, of) for one, of in zip(split, given)],
            [
                _with_same(_with_rows(one, sum(counts), data, i == 0), of)
                for i, (one, of) in enumerate(zip(parts, given), first)
            ],
        )
        for split, data in arranged
    ]


def _without_same(element: Any) -> Any:
    """Returns an element with None for its tensors that are the same for all rows."""
    return _with(element, {place: None for place in _places(element)})


def _with_same(element: Any, given: Any) -> Any:
    """Returns an element with these tensors of another one."""
    return _with(element, {place: tf.nest.flatten(data_of(given))[place] for place in _places(given)})


def _places(element: Any) -> list[int]:
    return element.same_for_all_rows if isinstance(element, KerasPart) else []


def _with(element: Any, values: dict[int, Any]) -> Any:
    if not values:
        return element
    data = data_of(element)
    flat = [values.get(place, value) for place, value in enumerate(tf.nest.flatten(data))]
    return element._replace(data=tf.nest.pack_sequence_as(data, flat))


def data_of(element: Any) -> Any:
    """Returns the data of an element as a train step gets it."""
    data = element.data if isinstance(element, KerasPart) else element
    # An optional stands for None in the batches of an iterator.
    return tf.nest.map_structure(lambda v: None if isinstance(v, tf.experimental.Optional) else v, data)


def _most_rows(strategy: Any, elements: list[Any]) -> int:
    """Returns how many rows of a replica are taken at most: all ranks agree on it.

    All rows together are on one replica in the end: no more than twice as many as a replica has in a step.
    """
    sizes = [np.inf]
    for one in map(data_of, elements):
        rows = _first_rows(one)
        tensors = [v for v in tf.nest.flatten(one, expand_composites=True) if tf.is_tensor(v) and v.dtype.size]
        size = sum(int(tf.size(v)) * v.dtype.size for v in tensors) / max(rows, 1)
        allowed = np.clip(_BYTES_OF_ROWS / max(size, 1), _LEAST_ROWS, _MOST_ROWS)
        sizes.append(min(allowed, max(2 * rows / strategy.num_replicas_in_sync, _LEAST_ROWS)))
    least = int(min(sizes))
    if strategy.num_replicas_in_sync == len(elements):
        return least
    return int(table(strategy, np.array([least], np.int64)).min())


def _taken(replica: int, rows: int, most: int) -> int:
    """Returns how many rows are taken of those of a replica; an even number of an even number, for pairs of rows."""
    wanted = max(int(min(rows, most) * _SHARES[replica % len(_SHARES)]), min(rows, 1))
    return wanted - 1 if wanted % 2 and rows % 2 == 0 and wanted > 1 else wanted


def _small(strategy: Any, replica: int, element: Any, most: int) -> Any:
    data = data_of(element)
    for value in tf.nest.flatten(data):
        if isinstance(value, tf.SparseTensor) or not (value is None or tf.is_tensor(value)):
            raise CannotTryError(f"its batches hold a {type(value).__name__}")
    if not isinstance(element, KerasPart):
        rows = _taken(replica, _first_rows(data), most)
        if not rows:
            raise CannotTryError("a replica has no rows in the first batch")
        return _cut(data, rows)
    total, replicas = int(element.total_rows), strategy.num_replicas_in_sync
    counts = [_taken(i, rows_of(total, replicas, i)[1], most) for i in range(replicas)]
    held = max(counts[replica], 1)  # A placeholder row.
    rows, total_rows = tf.constant(float(counts[replica])), tf.constant(float(sum(counts)))
    total_in_shape = tf.zeros([0, sum(counts)], tf.bool)
    return element._replace(
        data=_cut(data, held), rows=rows, total_rows=total_rows, sample=(), total_in_shape=total_in_shape
    )


def _rows_of_part(part: Any) -> tuple[Any, int]:
    return (part.data, int(part.rows)) if isinstance(part, KerasPart) else (part, _first_rows(part))


def _first_rows(data: Any) -> int:
    counted = [count_rows(value) for value in tf.nest.flatten(data) if value is not None]
    return next((int(one[0]) for one in counted if one is not None), 0)


def _cut(data: Any, rows: int, start: int = 0) -> Any:
    before = _first_rows(data)

    def cut(value: Any) -> Any:
        counted = None if value is None else count_rows(value)
        return value if counted is None or int(counted[0]) != before else value[start : start + rows]

    return tf.nest.map_structure(cut, data)


def _joined(values: tuple[Any, ...]) -> Any:
    return values[0] if values[0] is None or not values[0].shape.rank else tf.concat(values, 0)


def _backwards(whole: Any, rows: int) -> Any:
    def backwards(value: Any) -> Any:
        counted = None if value is None else count_rows(value)
        is_of_rows = counted is not None and int(counted[0]) == rows
        return tf.gather(value, tf.range(rows - 1, -1, -1)) if is_of_rows else value

    return tf.nest.map_structure(backwards, whole)


def _with_part(part: Any, whole: Any, counts: list[int], replica: int) -> Any:
    """Returns an element with the rows of a replica out of other rows of the batch, as many as before."""
    start, rows = sum(counts[:replica]), counts[replica]
    data = _cut(whole, max(rows, 1), start if rows else 0)
    return part._replace(data=data) if isinstance(part, KerasPart) else data


def _with_rows(part: Any, total: int, whole: Any, has_rows: bool) -> Any:
    """Returns an element with all rows of the batch; of weight 0 where `has_rows` is not set.

    A step may need more than one row (`tf.math.top_k(losses, 3)`), so the others do not hold one placeholder row.
    """
    if not isinstance(part, KerasPart):
        return whole if has_rows else _cut(whole, 0)
    return part._replace(data=whole, rows=tf.constant(float(total if has_rows else 0)))


def _of_all_ranks(strategy: Any, own: list[Any], why: str, like: Any) -> list[tuple[Any, int]]:
    """Exchanges the data and the rows of all replicas, also if this rank cannot take part."""
    texts = [] if why else [tf.io.serialize_tensor(v).numpy() for v in _tensors(own[0][0])]
    if sum(map(len, texts)) > _MOST_BYTES:
        texts, why = [], "its rows are too large to be sent to the other ranks"
    sizes = [own[0][1], *map(len, texts)] if texts else []
    sent = b"".join([np.array(sizes, np.int64).tobytes(), *texts])
    lengths = table(strategy, np.array([len(sent), bool(why)], np.int64))
    if lengths[:, 1].any():
        raise CannotTryError(why or "another rank cannot try it")
    row = np.frombuffer(sent.ljust(-(-int(lengths[:, 0].max()) // 8) * 8, b"\0"), np.int64)
    return [_read(one.tobytes(), like) for one in table(strategy, row)]


def _tensors(data: Any) -> list[Any]:
    return [value for value in tf.nest.flatten(data, expand_composites=True) if value is not None]


def _read(text: bytes, like: Any) -> tuple[Any, int]:
    structure = tf.nest.map_structure(of_any_rows, like)
    flat = tf.nest.flatten(structure, expand_composites=True)
    begins = 8 * (1 + sum(one is not None for one in flat))
    rows, *sizes = np.frombuffer(text[:begins], np.int64)
    ends = np.cumsum([begins, *sizes])
    texts = iter([text[begin:end] for begin, end in zip(ends[:-1], ends[1:])])
    values = [one if one is None else tf.io.parse_tensor(next(texts), one.dtype) for one in flat]
    return tf.nest.pack_sequence_as(structure, values, expand_composites=True), int(rows)


def of_any_rows(value: Any) -> Any:
    """Returns what stands for a ragged tensor with other rows; another value as it is."""
    if not isinstance(value, tf.RaggedTensor):
        return value
    sizes = [None, *value.shape[1:]]
    return tf.RaggedTensorSpec(sizes, value.dtype, value.ragged_rank, value.row_splits.dtype)
