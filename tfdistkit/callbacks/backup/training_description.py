"""Describes a training as plain data: the model with its losses and metrics, and the data of `fit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.description import describe, is_made_by_keras, sample
from tfdistkit.callbacks.backup.model_state import optimizers_of
from tfdistkit.keras_adapter import private_api, private_datasets
from tfdistkit.keras_adapter.dataset_graph import read_graph

_OFF = tf.data.experimental.AutoShardPolicy.OFF


def setup_of_model(model: keras.Model) -> dict[str, Any]:
    """Describes a built model, its optimizers, losses and metrics.

    Args:
        model: The model.

    Returns:
        Plain data.
    """
    layers = private_api.layers_of(model)
    names = _names(layers)
    return {
        "model": [_describe_layer(one, names) for one in layers],
        "connections": describe(_connections(model), names),
        "optimizer": [describe(one) for one in optimizers_of(model)],
        **{key: describe(one) for key, one in private_api.compile_arguments(model).items()},
    }


def _names(layers: list[Any]) -> dict[str, str]:
    """Maps names that Keras generated to stable ones: Keras numbers all objects of the process."""
    names: dict[str, str] = {}
    for one in layers:
        for name, kind in [(one.name, type(one).__name__), *_operations(one)]:
            if is_made_by_keras(name, kind):
                names.setdefault(name, f"{kind} {sum(known.startswith(f'{kind} ') for known in names.values())}")
    return names


def _operations(model: Any) -> list[tuple[str, str]]:
    return [(one.name, type(one).__name__) for one in getattr(model, "operations", ())]


def _describe_layer(layer: Any, names: dict[str, str]) -> Any:
    if not isinstance(layer, keras.Model):
        return describe(layer, names)
    return {"class": type(layer).__name__, "name": names.get(layer.name, layer.name), "trainable": layer.trainable}


def _connections(model: Any) -> Any:
    """Returns the connections of the layers of a functional model."""
    try:
        config = model.get_config() if isinstance(model, keras.Model) and hasattr(model, "operations") else {}
    except Exception:  # A layer without a configuration.
        return []
    return [[one.get("name"), one.get("inbound_nodes")] for one in config.get("layers", ())]


def setup_of_data(arguments: dict[str, Any], workers: int) -> dict[str, Any]:
    """Describes the data of `fit`.

    Args:
        arguments: The arguments of `fit`.
        workers: The number of training processes.

    Returns:
        Plain data. Iterators are not described: reading one consumes a batch.
    """
    x = arguments.get("x")
    setup = {name: describe(arguments.get(name)) for name in ("class_weight", "steps_per_epoch")}
    if isinstance(x, tf.data.Dataset):
        return {**setup, **_of_dataset(x, workers)}
    if isinstance(x, keras.utils.PyDataset):
        own = {name: value for name, value in vars(x).items() if not name.startswith("_")}
        known = {name: _of_attribute(name, value) for name, value in own.items()}
        setup["shuffle"] = describe(arguments.get("shuffle", True))
        return {**setup, "PyDataset": {"class": type(x).__name__, **{k: v for k, v in known.items() if v is not None}}}
    arrays = [arguments.get(name) for name in ("x", "y", "sample_weight")]
    flat = [one for one in keras.tree.flatten(arrays) if one is not None]
    if not flat or not all(hasattr(one, "shape") for one in flat):
        return setup
    setup["shuffle"] = describe(arguments.get("shuffle", True))
    return {**setup, "batch_size": arguments.get("batch_size") or 32, "arrays": [sample(one) for one in flat]}


def _of_attribute(name: str, value: Any) -> Any:
    if isinstance(value, (np.ndarray, tf.Tensor)):
        return sample(value)
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return sample(np.array(value))
    return value if "batch" in name and isinstance(value, int) else None


def _of_dataset(dataset: tf.data.Dataset, workers: int) -> dict[str, Any]:
    graph = read_graph(dataset)
    samples = [sample(one) for one in [*graph.arrays, *_captured(dataset)]]
    described = {"sources": samples, "numbers": [[f"{what}({name})", value] for what, name, value in graph.settings]}
    if dataset.options().experimental_distribute.auto_shard_policy == _OFF:
        # Each worker's own shard, which depends on the number of workers.
        described = {f"part of {workers}": described}
    specs = [_spec(one) for one in tf.nest.flatten(dataset.element_spec)]
    return {"element_spec": specs, "batch_size": private_datasets.batch_size_of(dataset), **described}


def _captured(dataset: tf.data.Dataset) -> Iterator[tf.Tensor]:
    """Yields the tensors that the functions of a dataset capture."""
    for one in private_datasets.inputs_of_dataset(dataset):
        yield from _captured(one)
    for wrapper in private_datasets.functions_of_dataset(dataset):
        for outer, _ in private_datasets.graph_of(wrapper).captures:
            if hasattr(outer, "numpy") and outer.dtype not in (tf.variant, tf.resource):
                yield outer


def _spec(spec: Any) -> str:
    shape = getattr(spec, "shape", None)
    sizes = [] if shape is None or shape.rank is None else shape.as_list()[1:]
    return f"{type(spec).__name__} {getattr(getattr(spec, 'dtype', None), 'name', '')} {[None, *sizes]}"
