"""The state of a model: its variables, its optimizers' variables, and each replica's counts (metrics)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.found_objects import found_from, found_in
from tfdistkit.callbacks.process_group import Ranks
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync.gradients.reducer_state import variables_of_replicas

# Under which Keras keeps the generator that `keras.random.normal(shape)` and the like draw from.
_GENERATOR = "global_seed_generator"
# How many numbers of a weight tell it from others.
_HASHED = 256


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the model's optimizer, and those that its own code uses (such as a GAN's two)."""
    found = [getattr(model, "optimizer", None), *vars(model).values(), *found_in(model)]
    kept = {id(one): one for one in found if isinstance(one, keras.optimizers.Optimizer)}
    return list(kept.values())


def variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables that are equal on all ranks: weights, layer state, seeds, optimizer variables."""
    others = {id(v) for v in (*model.metrics_variables, *(one for one, _ in _of_replicas(model)))}
    return [v for v in _all_variables(model) if id(v) not in others and not _is_on_read(v)]


def counts_of(model: keras.Model) -> list[Any]:
    """Returns the variables that differ per replica: metrics, and those with `synchronization="on_read"`."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in _all_variables(model) if id(v) in metrics or _is_on_read(v)]


def _of_replicas(model: keras.Model) -> list[tuple[Any, str]]:
    """Returns the variables that a compression or an algorithm keeps for each replica, and how they are combined."""
    return [pair for one in optimizers_of(model) for pair in variables_of_replicas(one)]


def value_of(variable: Any) -> np.ndarray:
    """Returns the value of a variable."""
    return np.asarray(raw_of(variable).numpy())


def hash_of_weights(model: keras.Model) -> str | None:
    """Returns a hash of the first numbers of each weight; all ranks call it. None for a model that is not built.

    Args:
        model: The model.
    """
    if not model.built or not model.weights:
        return None
    digest = hashlib.sha256()
    for variable in model.weights:
        raw = raw_of(variable)
        if raw.dtype != tf.string and tf.TensorShape(raw.shape).is_fully_defined():
            digest.update(f"{raw.dtype.name}{raw.shape}".encode())
            digest.update(np.asarray(tf.reshape(raw, [-1])[:_HASHED]).tobytes())
    return digest.hexdigest()


def all_variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables that a backup of a model holds."""
    return [*_all_variables(model), *(one for one, _ in _of_replicas(model))]


def equal_variables_in(objects: Iterable[Any]) -> list[Any]:
    """Returns the variables that objects are or hold, and that are equal on all ranks.

    Args:
        objects: Models, layers, optimizers, variables, lists of them and other objects.
    """
    found = found_from(objects)
    once: dict[int, Any] = {}
    for one in found:
        for variable in _variables_of_optimizer(one) if isinstance(one, keras.optimizers.Optimizer) else [one]:
            once.setdefault(id(raw_of(variable)), variable)
    shaped = [one for one in once.values() if tf.TensorShape(one.shape).is_fully_defined() and one.dtype != "string"]
    return [one for one in shaped if not _is_on_read(one)]


def require_known_variables(model: keras.Model, known: list[Any]) -> None:
    """Raises an error, after the first step, if that step created variables.

    A new process could not restore them before its own first step.

    Args:
        model: The model.
        known: The result of `variables_of` before the step.

    Raises:
        UnsupportedError: if there are new variables.
    """
    before = {id(raw_of(v)) for v in (*known, *(one for one, _ in _of_replicas(model)))}
    for optimizer in optimizers_of(model):
        if any(id(raw_of(v)) not in before for v in optimizer.variables):
            raise UnsupportedError(
                explain(
                    "Each optimizer must be built before `fit`, so that a backup can be restored into it.",
                    received=f"{type(optimizer).__name__} {optimizer.name!r} of {type(model).__name__}, built in the "
                    "first step",
                    do="Call `optimizer.build(variables)` with the variables that it trains, after `compile`.",
                )
            )
    new = [v for v in variables_of(model) if id(raw_of(v)) not in before]
    if new:
        raise UnsupportedError(
            explain(
                "Variables must be created before `fit`, so that a backup can be restored into them.",
                received=f"{getattr(new[0], 'path', new[0].name)!r} of {type(model).__name__}, created in a step",
                do="Create it in `__init__` or `build` of the model or layer.",
            )
        )


def raw_of(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras or TensorFlow variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _own_variables(model: keras.Model) -> list[Any]:
    """Returns variables that Keras does not list, such as counters of a `train_step`."""
    found = [one for one in found_in(model) if not isinstance(one, keras.optimizers.Optimizer)]
    return [one for one in found if tf.TensorShape(one.shape).is_fully_defined()]


def _variables_of_optimizer(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer, including those that Keras does not list.

    `LossScaleOptimizer` builds its inner optimizer without tracking attributes, so `variables` lacks the product that
    Nadam keeps.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    found = [*optimizer.variables, *(v for v in vars(inner).values() if isinstance(v, keras.Variable))]
    return list({id(v): v for v in found}.values())


def _all_variables(model: keras.Model) -> list[Any]:
    of_optimizers = [v for one in optimizers_of(model) for v in _variables_of_optimizer(one)]
    known = {id(raw_of(v)) for v in (*of_optimizers, *model.metrics_variables)}
    own = [v for v in _own_variables(model) if id(raw_of(v)) not in known]
    found = [*model.variables, *own, *of_optimizers, *model.metrics_variables]
    once: dict[int, Any] = {}
    for variable in found:
        once.setdefault(id(raw_of(variable)), variable)
    return [v for v in once.values() if v.dtype != "string"]


def _is_on_read(variable: Any) -> bool:
    return getattr(raw_of(variable), "synchronization", None) == tf.VariableSynchronization.ON_READ


@dataclass(frozen=True)
class ModelState:
    """A copy of the state of a model.

    Args:
        values: The values of the variables.
        counts: The values of each replica's counts, one row per replica.
        names: The names of the variables and counts.
        of_replicas: The values of what a compression or an algorithm keeps for each replica, one row per replica.
        aggregations: How the counts of the replicas are combined.
        seed: The state of Keras's generator for random numbers without a seed; None if nothing has drawn from it.
    """

    values: list[np.ndarray]
    counts: list[np.ndarray]
    names: list[str]
    of_replicas: list[np.ndarray] = field(default_factory=list)
    aggregations: list[str] = field(default_factory=list)
    seed: np.ndarray | None = None


def copy_state(model: keras.Model, ranks: Ranks, with_values: bool) -> ModelState:
    """Copies the state of a model; all ranks call it.

    Args:
        model: The model.
        ranks: The ranks that train it.
        with_values: Whether to copy the variables; the counts are always gathered, by a collective.
    """
    variables, counts = variables_of(model), counts_of(model)
    names = [str(getattr(v, "path", v.name)) for v in (*variables, *counts)]
    # Copied: on a CPU the array shares the variable's memory.
    values = [value_of(v).copy() for v in variables] if with_values else []
    kept: list[np.ndarray] = []
    for variable, _ in _of_replicas(model):  # As large as the weights: one by one, and only who writes keeps them.
        rows = _rows_of_all_replicas(model, [variable], ranks)
        kept += rows if with_values else []
    rows = _rows_of_all_replicas(model, counts, ranks)
    generator = private_api.thread_state().get(_GENERATOR)
    seed = None if generator is None or not with_values else value_of(generator.state).copy()
    return ModelState(values, rows, names, kept, [_aggregation_of(variable) for variable in counts], seed)


def put_state(
    model: keras.Model, state: ModelState, ranks: Ranks, with_counts: bool, with_optimizers: bool = True
) -> None:
    """Restores a copied state, on any number of replicas.

    Args:
        model: The model.
        state: The copy.
        ranks: The ranks that train the model.
        with_counts: Whether to restore the counts.
        with_optimizers: Whether to restore the optimizers; if not, they keep their initial state.

    Raises:
        UnsupportedError: if the variables of the copy and the model differ.
    """
    variables, counts = variables_of(model), counts_of(model)
    values = state.values
    if not with_optimizers:
        of_optimizers = {id(v) for one in optimizers_of(model) for v in _variables_of_optimizer(one)}
        variables = [v for v in variables if id(v) not in of_optimizers]
        values = values[: len(variables)]  # They come last.
    _require_same(variables, values, state.names, 0)
    _put_seed(model, state.seed)
    for variable, value in zip(variables, values):
        variable.assign(tf.constant(value, dtype=raw_of(variable).dtype))
    if with_optimizers:
        kept = _of_replicas(model)
        _require_same([one for one, _ in kept], [rows[0] for rows in state.of_replicas], [], len(variables))
        for (variable, aggregation), rows in zip(kept, state.of_replicas):
            _put_rows(model, variable, rows, ranks, aggregation)
    if not with_counts:
        return
    _require_same(counts, [rows[0] for rows in state.counts], state.names[len(state.values) :], len(variables))
    # As they were: a metric that is updated with the rows of all replicas is marked in its first update.
    for variable, rows, aggregation in zip(counts, state.counts, state.aggregations):
        _put_rows(model, variable, rows, ranks, aggregation)


def _put_seed(model: keras.Model, seed: np.ndarray | None) -> None:
    if seed is None:
        return
    if private_api.thread_state().get(_GENERATOR) is None:  # It is made when something draws, in the first step.
        with model.distribute_strategy.scope():
            private_api.add_to_thread_state({_GENERATOR: keras.random.SeedGenerator(0)})
    private_api.thread_state()[_GENERATOR].state.assign(seed)


def _aggregation_of(variable: Any) -> str:
    """Returns how the values of the replicas are combined: that of TensorFlow's variable, which tfdistkit may set."""
    own = getattr(raw_of(variable), "aggregation", None)
    return str(getattr(variable, "aggregation", "sum") if own in (None, tf.VariableAggregation.NONE) else own)


def _put_rows(model: keras.Model, variable: Any, rows: np.ndarray, ranks: Ranks, aggregation: str) -> None:
    local = _local(model, variable)
    mine = _for_replicas(rows, len(local) * ranks.size, aggregation)
    for i, component in enumerate(local):
        component.assign(tf.constant(mine[ranks.rank * len(local) + i], dtype=component.dtype))


def _local(model: keras.Model, variable: Any) -> list[Any]:
    """Returns the components of a variable in this process, one per replica."""
    return list(model.distribute_strategy.experimental_local_results(raw_of(variable)))


def _rows_of_all_replicas(model: keras.Model, counts: list[Any], ranks: Ranks) -> list[np.ndarray]:
    mine = [np.stack([np.asarray(one.numpy()) for one in _local(model, variable)]) for variable in counts]
    if ranks.is_single or not counts:
        return mine
    sizes = [rows.nbytes for rows in mine]
    packed: np.ndarray = np.zeros(-(-sum(sizes) // 8) * 8, np.uint8)
    packed[: sum(sizes)] = np.concatenate([rows.reshape(-1).view(np.uint8) for rows in mine])
    of_ranks: np.ndarray = ranks.gather(packed.view(np.int64)).view(np.uint8)
    found, start = [], 0
    for rows, size in zip(mine, sizes):
        parts = [one[start : start + size].copy().view(rows.dtype).reshape(rows.shape) for one in of_ranks]
        found.append(np.concatenate(parts))
        start += size
    return found


def _for_replicas(rows: np.ndarray, replicas: int, aggregation: str) -> np.ndarray:
    """Redistributes counts to another number of replicas, with the same aggregate."""
    if len(rows) == replicas:
        return rows
    if "sum" in aggregation.lower():
        others: np.ndarray = np.zeros((replicas - 1, *rows.shape[1:]), rows.dtype)
        return np.concatenate([rows.sum(0, dtype=rows.dtype)[None], others])
    one = rows[0] if "first" in aggregation.lower() else rows.mean(0).astype(rows.dtype)
    return np.stack([one] * replicas)


def _require_same(variables: list[Any], values: list[np.ndarray], names: list[str], skipped: int) -> None:
    has = [f"{raw_of(v).dtype.name}{list(v.shape)}" for v in variables]
    saved = [f"{value.dtype.name}{list(value.shape)}" for value in values]
    if has == saved:
        return
    at = next((i for i, (a, b) in enumerate(zip(has, saved)) if a != b), min(len(has), len(saved)))
    here = f"{getattr(variables[at], 'path', '')} {has[at]}" if at < len(has) else "no more variables"
    there = f"{names[at] if at < len(names) else ''} {saved[at]}".strip() if at < len(saved) else "no more variables"
    raise UnsupportedError(
        explain(
            "The model and optimizer must have the same variables as the backup.",
            received=f"variable {skipped + at}: {here}",
            expected=f"{there}, as in the backup",
            do="Use another folder for another model. Build an optimizer of your own `train_step` before `fit`: "
            "optimizer.build(variables).",
        )
    )
