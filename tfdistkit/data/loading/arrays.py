"""Data sets in memory, of which a worker touches its own rows only."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import ONE_ORDER, PADDED, marked, seed_mark
from tfdistkit.data.padding import require_weights_fit, weighted
from tfdistkit.data.rank_agreement import agreed
from tfdistkit.data.shard_spec import find_place, require_choice, require_even_steps, uneven
from tfdistkit.data.shuffle_order import agree_on_seed, epoch_seeds
from tfdistkit.errors import OptionError, explain

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
    """Makes a dataset of this worker's rows of some arrays.

    Shuffled, it goes through all rows in a random order without holding a buffer of them: the order is the same for
    any number of workers, and another one in each epoch. A worker prepares its own rows only.

    Args:
        arrays: An array, or a tuple or dict of arrays: NumPy, tensors, ragged tensors, all with equally many rows.
        shuffle: Whether to shuffle.
        seed: The order, from 0. Default: rank 0 chooses one, by TensorFlow's global generator.
        policy: `"auto"`, `"element"`: every `num_shards`-th row in the order of the epoch. `"seed"`: all rows for every
            worker, in an order of its own. `"off"`: all rows for every worker.
        even_steps: `"drop"`, `"pad"`, `"error"`, or None: see `shard`.
        num_shards: The number of parts. Default: `tfdistkit.world_size()`.
        index: The part to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A `tf.data.Dataset` of rows, sharded (see `shard`), to be batched with the global batch size.

    Raises:
        OptionError: (a ValueError) if the arrays do not fit together, or an option is wrong.
        UnsupportedError: (a RuntimeError) on all ranks, if they bring other arrays or arguments (`check_data`).

    Example:
        ```python
        train = tfdistkit.data.from_arrays((images, labels), shuffle=True, seed=1)
        model.fit(train.batch(64))
        ```
    """
    require_choice("policy", policy, _POLICIES, do="For `batch`, batch a dataset of `tf.data` and call `shard`.")
    require_even_steps(even_steps)
    with tf.device("CPU:0"):
        tensors = tf.nest.map_structure(_as_tensor, arrays)
    rows = _count(tensors)
    parts, own = find_place(num_shards, index)
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
    padded = [PADDED] if even_steps == "pad" and parts > 1 else []
    return marked(dataset, ONE_ORDER, *seed_mark(seed, order), *padded)


def _in_order(
    tensors: Any, rows: int, places: range, seed: int | None, stream: int, is_padded: bool = False
) -> tf.data.Dataset:
    """Returns the rows at some places of the order; with padding, places after the last one begin again."""
    if is_padded:
        require_weights_fit(tf.nest.map_structure(tf.type_spec_from_value, tensors))

    def row(place: Any, epoch_seed: Any) -> Any:
        number = place % rows if is_padded else place
        if epoch_seed is not None:
            number = tf.random.experimental.index_shuffle(number, tf.stack([epoch_seed, stream]), rows - 1)
        taken = tf.nest.map_structure(lambda tensor: _row(tensor, number), tensors)
        return weighted(taken, place >= rows) if is_padded else taken

    numbers = tf.data.Dataset.range(places.start, places.stop, places.step)
    if seed is None:
        return numbers.map(lambda place: row(place, None))
    shuffled = epoch_seeds(seed, stream).flat_map(lambda epoch: numbers.map(lambda place: row(place, epoch)))
    return shuffled.apply(tf.data.experimental.assert_cardinality(len(places)))


def _row(tensor: Any, number: Any) -> Any:
    return tensor[number] if isinstance(tensor, tf.RaggedTensor) else tf.gather(tensor, number)


def _as_tensor(array: Any) -> Any:
    if isinstance(array, tf.RaggedTensor):
        return array
    try:
        return tf.convert_to_tensor(array)
    except (TypeError, ValueError) as error:
        raise OptionError(
            explain(f"`arrays` holds something that is no array: {error}.", received=f"a {type(array).__name__}")
        ) from error


def _count(tensors: Any) -> int:
    flat = tf.nest.flatten(tensors)
    if not flat or any(tensor.shape.rank == 0 for tensor in flat):
        raise OptionError(
            explain("`arrays` holds no rows.", received=str(tf.nest.map_structure(lambda t: t.shape, tensors)))
        )
    counts = [int(tensor.nrows()) if isinstance(tensor, tf.RaggedTensor) else int(tensor.shape[0]) for tensor in flat]
    if len(set(counts)) > 1:
        raise OptionError(
            explain(
                "`arrays` do not have equally many rows.",
                received=", ".join(map(str, counts)),
                expected="the same number of each",
            )
        )
    return counts[0]
