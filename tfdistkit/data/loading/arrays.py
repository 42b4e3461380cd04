"""`from_arrays`: shards arrays in memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import ONE_ORDER, even_marks, marked, seed_mark
from tfdistkit.data.padding import require_weights_fit, with_weight
from tfdistkit.data.rank_agreement import agreed
from tfdistkit.data.shard_spec import find_shard, require_even_steps, uneven
from tfdistkit.data.shuffle_order import agree_on_seed, epoch_seeds, index_keys, shuffled_index
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_choice

_POLICIES = ("auto", "element", "seed", "off")


def from_arrays(
    arrays: Any,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    policy: str = "auto",
    even_steps: str | None = None,
    num_shards: int | None = None,
    index: int | None = None,
) -> tf.data.Dataset:
    """Creates a dataset of this worker's rows of some arrays.

    Shuffling permutes all rows without a shuffle buffer: the order is the same for any number of workers, and new in
    each epoch. A worker prepares only its own rows.

    Args:
        arrays: An array, or a tuple or dict of arrays: NumPy, tensors, ragged tensors, with equal numbers of rows.
        shuffle: Whether to shuffle.
        seed: The seed of the shuffle order, from 0. Default: rank 0 draws one from TensorFlow's global generator.
        policy: `"auto"`, `"element"`: every `num_shards`-th row in the order of the epoch. `"seed"`: all rows for every
            worker, each in its own shuffle order. `"off"`: all rows for every worker.
        even_steps: `"drop"`, `"pad"`, `"error"`, or None: see `shard`.
        num_shards: The number of shards. Default: `tfdistkit.world_size()`.
        index: The shard to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A sharded `tf.data.Dataset` of rows (see `shard`). Batch it with the global batch size.

    Raises:
        OptionError: (a ValueError) if the arrays differ in their rows, or an option is invalid.
        UnsupportedError: (a RuntimeError) on all ranks, if their arrays or arguments differ (`check_data`).

    Example:
        ```python
        train = tfdistkit.data.from_arrays((images, labels), shuffle=True, seed=1)
        model.fit(train.batch(64))
        ```
    """
    require_choice("policy", policy, _POLICIES, do='For "batch", batch a tf.data.Dataset and call `shard`.')
    require_even_steps(even_steps)
    with tf.device("CPU:0"):
        tensors = tf.nest.map_structure(_as_tensor, arrays)
    rows = _count(tensors)
    parts, own = find_shard(num_shards, index)
    if num_shards is None and policy not in ("seed", "off"):
        whole = tf.data.Dataset.from_tensors(tuple(tf.nest.flatten(tensors, expand_composites=True)))
        arguments = {"shuffle": shuffle, "seed": seed, "even_steps": even_steps}
        agreed(whole, parts, "tfdistkit.data.from_arrays", arguments=list(arguments.items()))
    order = agree_on_seed(seed, parts, num_shards is not None) if shuffle or policy == "seed" else None
    if policy in ("seed", "off"):
        stream = own if policy == "seed" else 0
        return marked(_in_order(tensors, rows, range(rows), order, stream), *seed_mark(seed, order))
    if even_steps == "error" and rows % parts:
        raise uneven(rows, parts, "rows")
    end = {"drop": rows - rows % parts, "pad": rows + -rows % parts}.get(even_steps or "", rows)
    dataset = _in_order(tensors, rows, range(own, end, parts), order, 0, even_steps == "pad")
    return marked(dataset, ONE_ORDER, *seed_mark(seed, order), *even_marks(even_steps, parts))


def _in_order(
    tensors: Any, rows: int, positions: range, seed: int | None, stream: int, is_padded: bool = False
) -> tf.data.Dataset:
    """Returns the rows at some positions of the shuffle order; with padding, positions wrap around at the end."""
    if is_padded:
        require_weights_fit(tf.nest.map_structure(tf.type_spec_from_value, tensors))

    def row(position: Any, keys: Any) -> Any:
        index = position % rows if is_padded else position
        if keys is not None:
            index = shuffled_index(index, keys, rows)
        taken = tf.nest.map_structure(lambda tensor: _row(tensor, index), tensors)
        return with_weight(taken, position >= rows) if is_padded else taken

    indices = tf.data.Dataset.range(positions.start, positions.stop, positions.step)
    if seed is None:
        return indices.map(lambda position: row(position, None))

    def epoch(epoch_seed: tf.Tensor) -> tf.data.Dataset:
        keys = index_keys(epoch_seed, stream)
        return indices.map(lambda position: row(position, keys))

    shuffled = epoch_seeds(seed, stream).flat_map(epoch)
    return shuffled.apply(tf.data.experimental.assert_cardinality(len(positions)))


def _row(tensor: Any, index: Any) -> Any:
    return tensor[index] if isinstance(tensor, tf.RaggedTensor) else tf.gather(tensor, index)


def _as_tensor(array: Any) -> Any:
    if isinstance(array, tf.RaggedTensor):
        return array
    try:
        return tf.convert_to_tensor(array)
    except (TypeError, ValueError) as error:
        raise OptionError(
            explain(
                "`arrays` must hold only NumPy arrays, tensors and ragged tensors.",
                received=f"an object of {type(array)}: {str(error).splitlines()[0].rstrip('.')}",
            )
        ) from error


def _count(tensors: Any) -> int:
    flat = tf.nest.flatten(tensors)
    if not flat or any(tensor.shape.rank == 0 for tensor in flat):
        raise OptionError(
            explain(
                "`arrays` must hold arrays with a first dimension, the rows.",
                received=f"shapes {tf.nest.map_structure(lambda t: t.shape, tensors)}",
            )
        )
    counts = [int(tensor.nrows()) if isinstance(tensor, tf.RaggedTensor) else int(tensor.shape[0]) for tensor in flat]
    if len(set(counts)) > 1:
        raise OptionError(
            explain(
                "`arrays` must all have the same number of rows.",
                received=", ".join(map(str, counts)) + " rows",
            )
        )
    return counts[0]
