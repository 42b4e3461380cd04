"""The code that touches private names of `tf.data`, which `private_names` lists with their reasons."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute as tf_data_distribute
from tensorflow.python.data.ops import (
    dataset_ops,
    from_tensor_slices_op,
    from_tensors_op,
    structured_function,
)


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Returns the rows of the batches that a dataset's own `batch` makes; None if something else made them."""
    size = int(tf_data_distribute.compute_batch_size(dataset))
    return None if size < 0 else size


def kind_of_dataset(dataset: tf.data.Dataset) -> str:
    """Returns what kind of dataset one is, such as `Shuffle` or `ParallelMap`."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def inputs_of_dataset(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that a dataset is made of, those within its attributes too (some have them only there)."""
    return list(dataset._inputs()) + [one for one in vars(dataset).values() if isinstance(one, dataset_ops.DatasetV2)]


def inputs_and_times(dataset: tf.data.Dataset) -> list[tuple[tf.data.Dataset, int]]:
    """Returns the datasets that a dataset is made of, and how often it takes each."""
    unique = {id(one): one for one in inputs_of_dataset(dataset)}.values()
    return [(one, sum(one is taken for taken in dataset._inputs())) for one in unique]


def functions_of_dataset(dataset: tf.data.Dataset) -> list[Any]:
    """Returns the functions of a dataset, as TensorFlow wraps them."""
    wrappers = [*dataset._functions(), *vars(dataset).values()]
    wrappers = [one for one in wrappers if isinstance(one, structured_function.StructuredFunctionWrapper)]
    unique = {id(one): one for one in wrappers}.values()
    return [one for one in unique if hasattr(one.function, "graph")]


def graph_behind(dataset: tf.data.Dataset) -> tf.Graph | None:
    """Returns the graph of a dataset of which Python knows no more than a variant tensor, if that is sure to be cheap.

    `choose_from_datasets` rewrites the dataset that chooses, and its Python objects are lost.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    if not isinstance(dataset, dataset_ops._VariantDataset):
        return None
    if len(specs) != 1 or not isinstance(specs[0], tf.TensorSpec) or specs[0].shape.rank != 0:
        return None
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    try:
        serialized = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    except (tf.errors.OpError, AttributeError):
        return None
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(serialized), name="")
    return graph


def keep_alive(dataset: tf.data.Dataset, other: Any) -> None:
    """Lets something live as long as the input pipeline of a dataset."""
    dataset._tfdistkit_needs = (other,)


def serialized_dataset(dataset: tf.data.Dataset) -> bytes:
    """Returns the graph of a dataset, with copies of its arrays."""
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return bytes(dataset._as_serialized_graph(external_state_policy=policy).numpy())


def graph_of(wrapper: Any) -> Any:
    """Returns the graph of a function of a dataset."""
    return wrapper.function.graph


def line_of(wrapper: Any) -> str:
    """Returns where the user wrote a function of a dataset, as ` (file:line)`; nothing if that is not known."""
    code = getattr(_python_function(wrapper), "__code__", None)
    return "" if code is None or _is_library(code.co_filename) else f" ({code.co_filename}:{code.co_firstlineno})"


def is_of_keras_arrays(wrapper: Any) -> bool:
    """Whether a function of a dataset is one with which Keras takes batches out of arrays."""
    return str(getattr(_python_function(wrapper), "__module__", "")).startswith("keras.src.trainers.data_adapters.")


def _python_function(wrapper: Any) -> Any:
    function = inspect.unwrap(wrapper._func)
    return getattr(function, "python_function", function)


def _is_library(file: str) -> bool:
    return any(part in file for part in ("/tensorflow/python/", "/keras/src/", "/tfdistkit/", "/autograph/", "<"))


def user_line(operation: Any) -> str:
    """Returns where the user wrote an operation of a graph, as ` (file:line)`; nothing if that is not known."""
    own = [frame for frame in operation.traceback or () if not _is_library(frame.filename)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def seeds_of_dataset(dataset: tf.data.Dataset) -> tuple[int | None, int | None] | None:
    """Returns the two seeds of a dataset that shuffles or makes random numbers, (0, 0) without; None for others."""
    if not hasattr(dataset, "_seed") or not hasattr(dataset, "_seed2"):
        return None
    return number_of_dataset(dataset, "_seed"), number_of_dataset(dataset, "_seed2")


def number_of_dataset(dataset: tf.data.Dataset, attribute: str) -> int | None:
    """Returns a number that a dataset was made with; None if it is unknown."""
    value = getattr(dataset, attribute, None)
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None


def cache_file_of(dataset: tf.data.Dataset) -> str:
    """Returns the file of a dataset that `cache(filename)` made; "" for one in memory, and for other datasets."""
    name = getattr(dataset, "_filename", None) if kind_of_dataset(dataset) == "Cache" else None
    return name.numpy().decode(errors="replace") if isinstance(name, tf.Tensor) and hasattr(name, "numpy") else ""


def note_order(original: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of a parallel `interleave`: keeps whether it was made with `deterministic=False`."""
    original(dataset, *args, **kwargs)
    given = inspect.signature(original).bind(dataset, *args, **kwargs).arguments.get("deterministic")
    dataset._sloppy = given is not None and not given


def is_sloppy(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset was made with `deterministic=False`."""
    return getattr(dataset, "_deterministic", None) in ("false", False) or getattr(dataset, "_sloppy", None) is True


def arrays_of_dataset(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns the tensors that `from_tensors` or `from_tensor_slices` made a dataset of."""
    if not isinstance(dataset, (from_tensors_op._TensorDataset, from_tensor_slices_op._TensorSliceDataset)):
        return []
    return [one for one in dataset._tensors if tf.is_tensor(one) and one.dtype not in (tf.variant, tf.resource)]


def datasets_of_variants(variants: list[tf.Tensor], wrapper: Any) -> list[tf.data.Dataset]:
    """Returns the datasets that a function took from outside; those that were garbage-collected are left out.

    Args:
        variants: The variant tensors that the graph of the function captured.
        wrapper: The function; None if it is not known in Python.
    """
    left = {id(variant): variant for variant in variants if hasattr(variant, "numpy")}
    found = []
    for one in _closed_over(wrapper) if left and wrapper is not None else ():
        if isinstance(one, dataset_ops.DatasetV2) and left.pop(id(one._variant_tensor), None) is not None:
            found.append(one)
    if left:  # In an attribute or in a function of a function: looking through all objects takes 0.1 s.
        found += [one for one in gc.get_referrers(*left.values()) if isinstance(one, dataset_ops.DatasetV2)]
    places = [id(variant) for variant in variants]
    return sorted(found, key=lambda one: places.index(id(one._variant_tensor)))


def _closed_over(wrapper: Any) -> list[Any]:
    try:
        taken = inspect.getclosurevars(_python_function(wrapper))
    except (TypeError, ValueError):
        return []
    return tf.nest.flatten([list(taken.nonlocals.values()), list(taken.globals.values())])


def attribute(operation: Any, name: str) -> Any:
    """Returns an attribute of an operation of a graph; None if it has none of this name."""
    try:
        return operation.get_attr(name)
    except ValueError:
        return None


def functions_of_operation(operation: Any) -> list[Any]:
    """Returns the graphs of the functions that an operation calls."""
    names = []
    for one in operation.op_def.attr:
        if one.type == "func":
            names.append(operation.get_attr(one.name).name)
        elif one.type == "list(func)":
            names += [function.name for function in operation.get_attr(one.name)]
    functions = [operation.graph._get_function(name) for name in names if name]
    return [function.graph for function in functions if getattr(function, "graph", None) is not None]
