"""Rebuilds a dataset with other seeds, so that ranks with different seeds read in one order.

The seeds of a dataset are fixed at its creation. So it is serialized as a graph, the seeds in the graph are replaced,
and a new dataset is created from it. This copies the arrays of `from_tensor_slices`, only on ranks that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdistkit.keras_adapter import private_datasets

Seeds = tuple[str, int, int]

# The index of the first seed among the inputs of an operation.
_FIRST_SEED = {"ShuffleDataset": 2, "ShuffleAndRepeatDataset": 2, "RandomDataset": 0}
# The index of its seed generator, the state that counts iterations.
_SEED_GENERATOR = {"ShuffleDatasetV3": 4, "ShuffleAndRepeatDatasetV2": 5, "RandomDatasetV2": 2}
_LARGEST_BYTES = 1_000_000_000


class _Place(NamedTuple):
    """An operation with seeds: its node, and the nodes of the graph or function that contains it."""

    node: Any
    nodes: Any
    suffix: str


class WrittenDataset:
    """A dataset serialized as a graph.

    Args:
        dataset: The dataset.
        array_bytes: The size of its arrays.

    Raises:
        ValueError: if it is not serializable: it has tables or variables, or is too large.
    """

    def __init__(self, dataset: tf.data.Dataset, array_bytes: int = 0):
        if array_bytes > _LARGEST_BYTES:
            raise ValueError(f"its arrays are too large to be copied ({array_bytes >> 20} MB)")
        self._dataset = dataset
        try:
            serialized = private_datasets.serialized_dataset(dataset)
        except (tf.errors.OpError, ValueError) as error:
            raise ValueError(str(getattr(error, "message", error)).splitlines()[0]) from error
        self._graph = tf.compat.v1.GraphDef.FromString(serialized)
        self._require_no_state()
        self._functions = {function.signature.name: function for function in self._graph.library.function}

    def _require_no_state(self) -> None:
        replaced = {node.input[_SEED_GENERATOR[node.op]] for node in self._graph.node if node.op in _SEED_GENERATOR}
        for node in self._graph.node:
            is_state = node.op == "Const" and node.attr["dtype"].type == tf.resource.as_datatype_enum
            if is_state and node.name not in replaced:
                raise ValueError("it has a table, a variable or a random generator")

    def seeds(self) -> list[Seeds]:
        """Returns the operation and the two seeds of each source of randomness; -1 for a computed seed."""
        return [(place.node.op, *self._seeds(place)) for place in self._places()]

    def with_seeds(self, seeds: list[Seeds]) -> tf.data.Dataset:
        """Returns the dataset with these seeds, in its initial state."""
        for place, (_, seed, seed2) in zip(list(self._places()), seeds, strict=True):
            self._set(place, seed, seed2)
        variant = tf.raw_ops.DatasetFromGraph(graph_def=self._graph.SerializeToString())
        dataset = tf.data.experimental.from_variant(variant, self._dataset.element_spec)
        dataset = dataset.with_options(self._dataset.options())
        private_datasets.keep_alive(dataset, self._dataset)  # Keeps its Python functions.
        return dataset

    def _places(self) -> Iterator[_Place]:
        yield from self._in(self._graph.node, "", set())

    def _in(self, nodes: Any, suffix: str, seen: set[str]) -> Iterator[_Place]:
        for node in list(nodes):
            if node.op.startswith(tuple(_FIRST_SEED)) or {"seed", "seed2"} <= set(node.attr):
                yield _Place(node, nodes, suffix)
            for name in sorted(node.attr):
                value = node.attr[name]
                for function in [value.func.name, *(one.name for one in value.list.func)]:
                    if function in self._functions and function not in seen:
                        seen.add(function)
                        yield from self._in(self._functions[function].node_def, ":output:0", seen)

    def _seeds(self, place: _Place) -> tuple[int, int]:
        first = _first_seed(place.node)
        if first is None:
            return place.node.attr["seed"].i, place.node.attr["seed2"].i
        by_name = {node.name: node for node in place.nodes}
        one, two = (_constant(by_name, name) for name in place.node.input[first : first + 2])
        return one, two

    def _set(self, place: _Place, seed: int, seed2: int) -> None:
        node, first = place.node, _first_seed(place.node)
        if first is None:
            node.attr["seed"].i, node.attr["seed2"].i = seed, seed2
            return
        for index, value in enumerate((seed, seed2)):
            if value != -1:
                constant = place.nodes.add(op="Const", name=f"tfdistkit/seed{index}/{node.name}")
                constant.attr["dtype"].type = tf.int64.as_datatype_enum
                constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))
                node.input[first + index] = constant.name + place.suffix
        if node.op in _SEED_GENERATOR and not place.suffix:
            generator = place.nodes.add(op="DummySeedGenerator", name=f"tfdistkit/generator/{node.name}")
            node.input[_SEED_GENERATOR[node.op]] = generator.name


def _first_seed(node: Any) -> int | None:
    return next((index for kind, index in _FIRST_SEED.items() if node.op.startswith(kind)), None)


def _constant(by_name: dict[str, Any], name: str) -> int:
    node = by_name.get(name.partition(":")[0])
    if node is not None and node.op == "SelectV2":  # tf.data uses it to avoid two seeds of 0.
        return _constant(by_name, node.input[2])
    if node is None or node.op != "Const":
        return -1
    return int(tf.make_ndarray(node.attr["value"].tensor))
