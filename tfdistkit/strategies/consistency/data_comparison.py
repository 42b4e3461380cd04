"""Compares the data of all ranks before `fit`, `evaluate`, `predict`, `shard` and loops of the user begin.

Each rank takes its rows from its own copy of a batch. Where the copies differ, some rows are lost and others are
trained on twice. So the ranks exchange one number, a hash of facts about their data. Only if it differs do they
exchange the facts, and then set equal seeds, or raise an error that names the rank and the difference.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.data.batch_info import info_of
from tfdistkit.data.dataset_metadata import EVEN, ONE_ORDER, ROWS_OF_BATCHES, SHARDED, has_mark
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter.dataset_graph import DatasetGraph, read_graph
from tfdistkit.keras_adapter.dataset_seeds import WrittenDataset
from tfdistkit.keras_adapter.private_datasets import inputs_of_dataset
from tfdistkit.strategies.consistency.batch_hashes import mark_of_array
from tfdistkit.strategies.consistency.data_differences import (
    difference,
    equal_parts,
    shared_cache,
    uneven_repeats,
    warn_of_repeats,
    warn_of_selection,
)
from tfdistkit.strategies.consistency.row_exchange import table

Facts = dict[str, Any]

# Placeholder for the reason in an error, until the ranks have exchanged it.
_WHY = "it cannot be written as a graph"


def is_compared(strategy: Any) -> bool:
    """Returns whether the ranks of a strategy compare their data: several processes, and `check_data` is not False."""
    several = strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)
    return bool(several and strategy.check_data)


def is_divided(dataset: tf.data.Dataset) -> bool:
    """Returns whether each process has its own part of the data (`AutoShardPolicy.OFF`)."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.OFF)


def agree_on_data(
    strategy: Any, dataset: Any, call: str, is_own_part: bool, more: Facts
) -> tuple[Any, DatasetGraph | None]:
    """Compares the data of the ranks, and makes their seeds equal.

    Args:
        strategy: The strategy, of several processes.
        dataset: The data: a `tf.data.Dataset`, or a distributed dataset of the user.
        call: The method that reads it, such as `fit`.
        is_own_part: Whether each process has its own data. Then only its structure is compared.
        more: Further facts that must be equal, by name.

    Returns:
        The dataset, with the seeds of rank 0 if they differed, and its graph; None where each process has its own data.

    Raises:
        UnsupportedError: on all ranks, if they differ, or if the data has no fixed order.
    """
    of_dataset = read_graph(dataset) if isinstance(dataset, tf.data.Dataset) else None
    graph = None if is_own_part else of_dataset
    facts = {"call": call, "own_part": graph is None, "spec": _spec(dataset), **more}
    if graph is not None:
        facts |= _facts(dataset, graph)
    elif of_dataset is not None:
        facts["part"] = _facts_of_part(dataset, of_dataset)
    if of_dataset is not None and (caches := _caches(dataset, of_dataset, is_own_part)):
        facts["caches"], facts["host"] = caches, os.uname().nodename
    if of_dataset is not None:
        facts["repeated"] = _repeated_parts(of_dataset)
    everyone = compared(strategy, facts, bool(facts.get("unordered") or facts.get("unseeded")))
    shared = shared_cache(everyone or [facts] * 2, call)
    if shared is not None:
        raise shared
    uneven = uneven_repeats(everyone, call)
    if uneven is not None:
        raise uneven
    if None in facts.get("repeated", ()):
        warn_of_repeats(call)
    for method in _selected_from_parts(of_dataset) if of_dataset is not None else ():
        warn_of_selection(method, call)
    if everyone is None and facts.get("part"):
        raise equal_parts(call)
    if everyone is None:
        return dataset, graph
    error = difference(everyone, call, [str(found) for found in graph.nondeterminism] if graph else [])
    if error is not None:
        raise error
    if graph is not None:
        dataset = _with_equal_seeds(strategy, dataset, graph, everyone, call)
    return dataset, graph


def compared(strategy: Any, facts: Any, always: bool = False) -> list[Any] | None:
    """Compares facts between the processes by a hash.

    Args:
        strategy: The strategy.
        facts: Any JSON value.
        always: Whether to exchange the facts even if they are equal.

    Returns:
        The facts of all processes, if they differ or with `always`; else None.
    """
    text = json.dumps(facts, sort_keys=True, default=str).encode()
    own = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little") * 2 + always
    numbers = table(strategy, np.array([own, len(text)], np.int64))
    if (numbers[:, 0] == numbers[0, 0]).all() and not always:
        return None
    longest = int(numbers[:, 1].max())
    padded = np.frombuffer(text.ljust(longest + (-longest % 8), b" "), np.int64)
    return [json.loads(row.tobytes()) for row in table(strategy, padded)]


def _spec(dataset: Any) -> Any:
    """Returns the structure of the elements without the number of rows, in which parts of a batch may differ."""
    spec = info_of(dataset).element_spec or getattr(dataset, "element_spec", None)

    def described(one: Any) -> Any:
        shape = getattr(one, "shape", None)
        of_rows = str(shape[1:]) if isinstance(shape, tf.TensorShape) else None
        return [type(one).__name__, str(getattr(one, "dtype", None)), of_rows]

    return str(tf.nest.map_structure(described, spec))


def _facts(dataset: tf.data.Dataset, graph: DatasetGraph) -> Facts:
    orders = [source for source in graph.random if source.decides_order]
    numbers = [array for array in graph.arrays if array.dtype != tf.string]
    texts = [array for array in graph.arrays if array.dtype == tf.string]
    return {
        "generator": graph.has_generator,
        "unordered": len(graph.nondeterminism),
        "settings": [list(setting) for setting in graph.settings],
        "arrays": [[str(array.dtype.name), array.shape.as_list(), mark_of_array(array)] for array in numbers],
        "random": [str(source.kind) for source in orders],
        "cardinality": int(dataset.cardinality()),
        "seeds": [[source.kind, *source.seeds] for source in graph.random],
        "unseeded": sum(not source.is_seeded and None not in source.seeds for source in orders),
        # Only a hint: the same files may have other names on another host.
        "texts": [mark_of_array(array) for array in texts],
    }


def _facts_of_part(dataset: tf.data.Dataset, graph: DatasetGraph) -> Facts | None:
    """Returns what ranks that each bring rows of their own must differ in; None where that is not known."""
    if not is_divided(dataset) or has_mark(dataset, SHARDED):
        return None
    if graph.has_generator or graph.has_functions or not graph.arrays:
        return None  # A function may know its rank.
    facts = _facts(dataset, graph)
    return {name: facts[name] for name in ("settings", "arrays", "texts")}


def _caches(dataset: tf.data.Dataset, graph: DatasetGraph, is_own_part: bool) -> list[Any]:
    """Returns the files of `cache(filename)`: the path of each, and whether ranks of a host can share it."""
    found = []
    for file, cached in graph.caches:
        of_rank = is_own_part and (has_mark(cached, SHARDED) or not has_mark(dataset, SHARDED))
        is_complete = tf.io.gfile.exists(f"{file}.index")
        found.append([os.path.abspath(file), is_complete and not of_rank])
    return found


def _repeated_parts(graph: DatasetGraph) -> list[int | None]:
    """Returns the elements of each of this worker's parts that `repeat` takes more than once; None if unknown."""
    sizes: list[int | None] = []
    for dataset in graph.repeated:
        if not has_mark(dataset, ONE_ORDER) or has_mark(dataset, ROWS_OF_BATCHES):
            continue  # A part of each batch of the whole data has as many batches as that.
        while (inputs := inputs_of_dataset(dataset)) and has_mark(inputs[0], ONE_ORDER):
            dataset = inputs[0]
        size = int(dataset.cardinality())
        if size >= 0:
            sizes.append(size)
        elif size == tf.data.UNKNOWN_CARDINALITY and not has_mark(dataset, EVEN):
            sizes.append(None)
    return sizes


def _selected_from_parts(graph: DatasetGraph) -> list[str]:
    """Returns the methods that take elements of this worker's part, where one process takes those of the whole data."""
    parts = [(method, of) for method, of in graph.selected if has_mark(of, ONE_ORDER)]
    return list(dict.fromkeys(method for method, of in parts if not has_mark(of, ROWS_OF_BATCHES)))


def _with_equal_seeds(strategy: Any, dataset: Any, graph: DatasetGraph, everyone: list[Facts], call: str) -> Any:
    """Returns the dataset with the seeds of rank 0, if they differ on any rank."""
    if all(facts["seeds"] == everyone[0]["seeds"] for facts in everyone) and not everyone[0]["unseeded"]:
        return dataset
    return remade(strategy, dataset, graph, _seeds_differ(everyone, graph, call))


def remade(strategy: Any, dataset: Any, graph: DatasetGraph, otherwise: UnsupportedError) -> Any:
    """Rebuilds a dataset from its graph, unread, with the seeds of rank 0.

    Args:
        strategy: The strategy.
        dataset: The dataset.
        graph: Its graph.
        otherwise: The error for a dataset that cannot be rebuilt.

    Raises:
        UnsupportedError: on all ranks, if one of them cannot rebuild it.
    """
    seeds, why, written = None, None, None
    try:
        written = WrittenDataset(dataset, sum(int(a.dtype.size * a.shape.num_elements()) for a in graph.arrays))
        seeds = [_chosen(*one) for one in written.seeds()]
    except ValueError as error:
        why = str(error)
    everyone = compared(strategy, {"seeds": seeds, "why": why}, always=True) or []
    if any(one["seeds"] is None for one in everyone) or _kinds(everyone[0]) != _kinds({"seeds": seeds}):
        if any(source.decides_order for source in graph.random):
            why = next((one["why"] for one in everyone if one["why"]), "it has other operations on another rank")
            raise UnsupportedError(str(otherwise).replace(_WHY, why))
        return dataset  # The seeds affect values, not the order: each replica keeps its own values.
    assert written is not None
    return written.with_seeds([tuple(one) for one in everyone[0]["seeds"]])


def _chosen(kind: str, seed: int, seed2: int) -> tuple[str, int, int]:
    if (seed, seed2) != (0, 0):
        return kind, seed, seed2
    one, two = np.random.default_rng().integers(1, 2**31, 2)
    return kind, int(one), int(two)


def _kinds(facts: Facts) -> list[str]:
    return [kind for kind, *_ in facts["seeds"]]


def _seeds_differ(everyone: list[Facts], graph: DatasetGraph, call: str) -> UnsupportedError:
    seeds = [facts["seeds"] for facts in everyone]
    rank = next((rank for rank, own in enumerate(seeds) if own != seeds[0]), 0)
    places = [place for place, (a, b) in enumerate(zip(seeds[0], seeds[rank])) if a != b]
    place = places[0] if places else [source.decides_order for source in graph.random].index(True)
    return UnsupportedError(
        explain(
            f"All ranks must read the data of `{call}` in one shuffle order, or rows are lost and others repeated: "
            f"{graph.random[place]} has different seeds, and the dataset cannot be rebuilt with equal ones: {_WHY}.",
            received=f"the seeds {seeds[0][place][1:]} on rank 0, {seeds[rank][place][1:]} on rank {rank}",
            expected="the same seeds on all ranks",
            do="Call keras.utils.set_random_seed with the same number on all ranks, draw no random numbers on only one "
            "rank before the dataset is made, or write `shuffle(..., seed=7)`.",
        )
    )
