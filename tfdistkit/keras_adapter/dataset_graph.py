"""Finds everything in the graph of a `tf.data.Dataset` that determines its order and its values.

The graph is read from the Python objects of the datasets, and inside functions (`map`, `interleave`,
`group_by_window`, ...) from their operations. TensorFlow's serialized graph has the same content, but also copies of
the arrays of `from_tensor_slices`: 12 seconds for 500 MB, and an error above 2 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_datasets

# Operations that determine the elements and their order.
_ORDERS = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")
# Their functions determine it, too; functions of other transformations only compute values.
_CHOOSING = ("Filter", "TakeWhile", "FlatMap", "Interleave", "GroupByWindow", "GroupByReducer", "Snapshot", "Load")
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
# Numeric arguments that select and group elements, by the Python attribute that stores them.
_SETTINGS = {
    **dict.fromkeys(("Skip", "Take", "Repeat"), ("_count",)),
    "Shard": ("_num_shards", "_index"),
    "Shuffle": ("_buffer_size",),
    **dict.fromkeys(("Batch", "ParallelBatch", "PaddedBatch", "DenseToRagged"), ("_batch_size",)),
    "Range": ("_start", "_stop", "_step"),
    "Window": ("_size", "_shift", "_stride"),
    **dict.fromkeys(("Interleave", "ParallelInterleave"), ("_cycle_length", "_block_length")),
}

# Methods after which there are fewer or more elements.
_SELECTING = ("Take", "Skip", "Filter", "TakeWhile", "Unbatch", "FlatMap", "Interleave", "ParallelInterleave")


@dataclass(frozen=True)
class RandomSource:
    """Something random in a dataset.

    Args:
        kind: The user's method (`shuffle`), or TensorFlow's operation (`RandomUniform`).
        seeds: Its two seeds; None for one that is computed when the dataset is read.
        is_seeded: Whether equal seeds give equal results in every process.
        decides_order: Whether it determines the elements and their order; if not, it computes values.
        where: Its function, and the user's line if known.
        is_parallel: Whether it draws for several elements in parallel, so that the assignment is random.
    """

    kind: str
    seeds: tuple[int | None, int | None]
    is_seeded: bool
    decides_order: bool
    where: str
    is_parallel: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.where}"


@dataclass(frozen=True)
class Nondeterminism:
    """A transformation that yields elements in the order in which they become ready.

    Args:
        what: The option, as the user writes it (`deterministic=False`).
        where: The transformation, its function, and the user's line if known.
    """

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what}{self.where}"


@dataclass
class DatasetGraph:
    """The findings in the graph of a dataset, each in the order of the data flow.

    Args:
        random: The sources of randomness.
        nondeterminism: The transformations without a fixed order.
        settings: The numbers by which elements are selected and grouped: `(method, argument, value)`.
        arrays: The source tensors of the elements.
        caches: The datasets that keep their elements in a file, each with its name.
        repeated: The datasets that `repeat` takes more than once.
        selected: The datasets of which a method takes other elements, or another number of them, with its name.
        runs_python: Whether the user's Python code computes elements (a generator, a `py_function`).
        has_generator: Whether elements come from a Python generator.
        has_functions: Whether functions of the user's choose or compute elements.
    """

    random: list[RandomSource] = field(default_factory=list)
    nondeterminism: list[Nondeterminism] = field(default_factory=list)
    settings: list[tuple[str, str, int]] = field(default_factory=list)
    arrays: list[tf.Tensor] = field(default_factory=list)
    caches: list[tuple[str, tf.data.Dataset]] = field(default_factory=list)
    repeated: list[tf.data.Dataset] = field(default_factory=list)
    selected: list[tuple[str, tf.data.Dataset]] = field(default_factory=list)
    runs_python: bool = False
    has_generator: bool = False
    has_functions: bool = False


def nondeterminism(dataset: tf.data.Dataset) -> list[Nondeterminism]:
    """Returns the transformations in a dataset that have no fixed order.

    Args:
        dataset: The dataset.
    """
    return read_graph(dataset).nondeterminism


def read_graph(dataset: tf.data.Dataset) -> DatasetGraph:
    """Reads the whole graph of a dataset.

    Args:
        dataset: The dataset. Inputs behind a bare variant tensor (`from_variant`) stay unknown.
    """
    reader = _Reader()
    reader.read(dataset, "", False)
    if dataset.options().deterministic is False:
        reader.graph.nondeterminism.append(Nondeterminism("`options.deterministic = False`", ""))
    return reader.graph


class _Reader:
    """Visits datasets and functions, each once."""

    def __init__(self) -> None:
        self.graph = DatasetGraph()
        self._seen: dict[int, Any] = {}

    def _is_new(self, thing: Any) -> bool:
        is_new = id(thing) not in self._seen
        self._seen[id(thing)] = thing  # Kept, so that its id stays its own.
        return is_new

    def read(self, dataset: Any, where: str, chooses: bool) -> None:
        """Reads a dataset after its inputs.

        Args:
            dataset: The dataset.
            where: The function that contains it.
            chooses: Whether randomness in it determines the order of elements.
        """
        if not self._is_new(dataset):
            return
        for one in private_datasets.inputs_of_dataset(dataset):
            self.read(one, where, chooses)
        behind = private_datasets.graph_behind(dataset)
        for operation in [] if behind is None else behind.get_operations():
            self._read_operation(operation, {}, where, chooses, False)
        name = private_datasets.kind_of_dataset(dataset)
        self._read_object(dataset, name, where)
        for wrapper in private_datasets.functions_of_dataset(dataset):
            inside = f" in the function of {_called(name)}{private_datasets.line_of(wrapper)}{where}"
            chosen = chooses or name.removeprefix("Parallel").startswith(_CHOOSING)
            self._read_function(private_datasets.graph_of(wrapper), wrapper, inside, chosen)

    def _read_object(self, dataset: Any, name: str, where: str) -> None:
        seeds = private_datasets.seeds_of_dataset(dataset)
        if seeds is not None:
            self._add(RandomSource(f"`{_method(name)}`", seeds, seeds != (0, 0), True, where))
        if private_datasets.is_sloppy(dataset):
            line = "".join(private_datasets.line_of(one) for one in private_datasets.functions_of_dataset(dataset))
            of = f" of `{_method(name)}`{line}{where}"
            self.graph.nondeterminism.append(Nondeterminism("`deterministic=False`", of))
        for attribute in _SETTINGS.get(name, ()):
            value = private_datasets.number_of_dataset(dataset, attribute)
            if value is not None:
                self.graph.settings.append((_method(name), attribute.lstrip("_"), value))
        self.graph.arrays += private_datasets.arrays_of_dataset(dataset)
        if file := private_datasets.cache_file_of(dataset):
            self.graph.caches.append((file, dataset))
        if name == "Repeat" and private_datasets.number_of_dataset(dataset, "_count") != 1:
            self.graph.repeated += private_datasets.inputs_of_dataset(dataset)[:1]
        if name in _SELECTING:
            self.graph.selected += [(_method(name), one) for one in private_datasets.inputs_of_dataset(dataset)[:1]]

    def _add(self, source: RandomSource) -> None:
        self.graph.random.append(source)

    def _read_function(self, function: Any, wrapper: Any, where: str, chooses: bool) -> None:
        """Reads the graph of a function, and the datasets that it captures."""
        if not self._is_new(function):
            return
        self.graph.has_functions = True
        captures = {inner.name: outer for outer, inner in function.captures}
        variants = [outer for outer in captures.values() if outer.dtype == tf.variant]
        for dataset in private_datasets.datasets_of_variants(variants, wrapper):
            self.read(dataset, where, chooses)
        has_state = any(outer.dtype == tf.resource for outer in captures.values())
        for operation in function.get_operations():
            self._read_operation(operation, captures, where, chooses, has_state)

    def _read_operation(
        self, operation: Any, captures: dict[str, Any], where: str, chooses: bool, has_state: bool
    ) -> None:
        kind, line = operation.type, ""
        self.graph.runs_python |= kind in _PYTHON
        self.graph.has_generator |= kind == "GeneratorDataset"
        of_dataset = kind.startswith(_ORDERS)
        seeds = _seeds_of_dataset(operation, captures) if of_dataset else _seeds_of_value(operation, has_state)
        if seeds is not None:
            line = private_datasets.user_line(operation)
            name = f"`{_method(kind.partition('Dataset')[0])}`" if of_dataset else f"`{kind}`"
            is_seeded = seeds != (0, 0) and not (has_state and not of_dataset and None in seeds)
            is_parallel = "of a parallel `" in where and not of_dataset
            self._add(RandomSource(name, seeds, is_seeded, of_dataset or chooses, f"{line}{where}", is_parallel))
        self._read_attributes(operation, f"{line}{where}")
        inside = f" in the function of {_called(kind.partition('Dataset')[0])}{where}" if "Dataset" in kind else where
        for function in private_datasets.functions_of_operation(operation):
            chosen = chooses or kind.removeprefix("Parallel").startswith(_CHOOSING)
            self._read_function(function, None, inside, chosen)

    def _read_attributes(self, operation: Any, where: str) -> None:
        if "Dataset" not in operation.type:
            return
        deterministic = private_datasets.attribute(operation, "deterministic")
        if deterministic in (b"false", "false") or private_datasets.attribute(operation, "sloppy") is True:
            method = _method(operation.type.partition("Dataset")[0])
            self.graph.nondeterminism.append(Nondeterminism("`deterministic=False`", f" of `{method}`{where}"))


def _seeds_of_dataset(operation: Any, captures: dict[str, Any]) -> tuple[int | None, int | None]:
    """Returns the seeds of an operation that creates a shuffled or a random dataset."""
    at = {"ShuffleDataset": 2, "ShuffleAndRepeatDataset": 2, "RandomDataset": 0}
    first = next(index for kind, index in at.items() if operation.type.startswith(kind))
    pair = list(operation.inputs)[first : first + 2]
    return (_number(pair[0], captures), _number(pair[1], captures)) if len(pair) == 2 else (None, None)


def _seeds_of_value(operation: Any, has_state: bool) -> tuple[int | None, int | None] | None:
    """Returns the seeds of an operation that draws random values; None for other operations."""
    seed, seed2 = (private_datasets.attribute(operation, name) for name in ("seed", "seed2"))
    if isinstance(seed, int) and isinstance(seed2, int):
        return seed, seed2
    if operation.type.startswith("Stateful") and "Partitioned" not in operation.type:
        return None, None  # A tf.random.Generator has no seed attributes.
    return (None, None) if has_state and operation.type.startswith("StatelessRandom") else None


def _number(tensor: Any, captures: dict[str, Any]) -> int | None:
    """Returns the value of a scalar if it is static, else None."""
    outer = captures.get(tensor.name)
    if outer is not None:
        return int(outer.numpy()) if hasattr(outer, "numpy") else None
    if tensor.op.type == "SelectV2":  # tf.data uses it to avoid two seeds of 0.
        return _number(tensor.op.inputs[2], captures)
    known = tf.get_static_value(tensor)
    return None if known is None else int(known)


def _method(name: str) -> str:
    """Returns the name of the user's method: `group_by_window` for `GroupByWindow`."""
    name = name.removeprefix("Parallel").removesuffix("V2").removesuffix("V3")
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return words.strip("_")


def _called(name: str) -> str:
    return f"{'a parallel ' if name.startswith('Parallel') else ''}`{_method(name)}`"
