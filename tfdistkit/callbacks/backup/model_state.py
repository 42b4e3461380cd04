"""What of a model is state: its variables, those of its optimizers, and what each replica has counted for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.process_group import Ranks
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the model's optimizer, and others that it keeps as attributes (a GAN's two, say)."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    kept = {id(one): one for one in found if isinstance(one, keras.optimizers.Optimizer)}
    return list(kept.values())


def variables_of(model: keras.Model) -> list[Any]:
    """Returns what every rank holds all of: weights, layer state, seeds, and the optimizers' variables."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in _all_variables(model) if id(v) not in metrics and not _is_on_read(v)]


def counts_of(model: keras.Model) -> list[Any]:
    """Returns what each replica holds a part of: metrics, and variables with `synchronization="on_read"`."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in _all_variables(model) if id(v) in metrics or _is_on_read(v)]


def value_of(variable: Any) -> np.ndarray:
    """Returns what a variable holds."""
    return np.asarray(_raw(variable).numpy())


def require_known_optimizers(model: keras.Model, known: list[Any]) -> None:
    """Raises an error, after the first step, if that step has made variables of an optimizer.

    Args:
        model: The model.
        known: What `variables_of` said before it.

    Raises:
        UnsupportedError: if so: a new process could not take them from a backup before its own first step.
    """
    before = {id(v) for v in known}
    for optimizer in optimizers_of(model):
        if any(id(v) not in before for v in optimizer.variables):
            raise UnsupportedError(
                explain(
                    "An optimizer got its variables in the first step, so that no backup could be put back into it.",
                    received=f"{type(optimizer).__name__} {optimizer.name!r} of {type(model).__name__}",
                    expected="an optimizer that is built before `fit`",
                    do="Call `optimizer.build(variables)` with the variables that it trains, behind `compile`.",
                )
            )


def _raw(variable: Any) -> Any:
    """The TensorFlow variable of a Keras variable; others are one."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _own_variables(model: keras.Model) -> list[Any]:
    """TensorFlow's variables in attributes of the model and its layers, such as counters of a `train_step`."""
    found = []
    for layer in private_api.layers_of(model):
        for name, value in vars(layer).items():
            value = value.state if isinstance(value, tf.random.Generator) else value
            if isinstance(value, tf.Variable) and not name.startswith("_") and value.shape.is_fully_defined():
                found.append(value)
    return found


def _all_variables(model: keras.Model) -> list[Any]:
    of_optimizers = [v for one in optimizers_of(model) for v in one.variables]
    found = [*model.variables, *_own_variables(model), *of_optimizers, *model.metrics_variables]
    return [v for v in {id(v): v for v in found}.values() if v.dtype != "string"]


def _is_on_read(variable: Any) -> bool:
    return getattr(_raw(variable), "synchronization", None) == tf.VariableSynchronization.ON_READ


@dataclass(frozen=True)
class ModelState:
    """The state of a model, copied.

    Args:
        values: What the variables hold.
        counts: What each replica of the job has counted, a row for each replica.
        names: What the variables and counts are called.
    """

    values: list[np.ndarray]
    counts: list[np.ndarray]
    names: list[str]


def copy_state(model: keras.Model, ranks: Ranks, with_values: bool) -> ModelState:
    """Copies the state of a model; all ranks call it.

    Args:
        model: The model.
        ranks: The ranks that train it.
        with_values: Whether to copy what all ranks hold; the counts are copied anyway, which takes all ranks.
    """
    variables, counts = variables_of(model), counts_of(model)
    names = [str(getattr(v, "path", v.name)) for v in (*variables, *counts)]
    # Copied: on a CPU the array of a variable is the variable's own memory.
    values = [value_of(v).copy() for v in variables] if with_values else []
    return ModelState(values, _rows_of_all_replicas(model, counts, ranks), names)


def put_state(
    model: keras.Model, state: ModelState, ranks: Ranks, with_counts: bool, with_optimizers: bool = True
) -> None:
    """Gives a model the state of a copy, on any number of replicas.

    Args:
        model: The model.
        state: The copy.
        ranks: The ranks that train the model.
        with_counts: Whether to give it what was counted, too.
        with_optimizers: Whether to give its optimizers theirs; if not, they begin as they were made.

    Raises:
        UnsupportedError: if the copy is that of another model.
    """
    variables, counts = variables_of(model), counts_of(model)
    values = state.values
    if not with_optimizers:
        of_optimizers = {id(v) for one in optimizers_of(model) for v in one.variables}
        variables = [v for v in variables if id(v) not in of_optimizers]
        values = values[: len(variables)]  # They come last.
    _require_same(variables, values, state.names, 0)
    for variable, value in zip(variables, values):
        variable.assign(tf.constant(value, dtype=_raw(variable).dtype))
    if not with_counts:
        return
    _require_same(counts, [rows[0] for rows in state.counts], state.names[len(state.values) :], len(variables))
    for variable, rows in zip(counts, state.counts):
        local = _local(model, variable)
        mine = _for_replicas(rows, len(local) * ranks.size, str(getattr(variable, "aggregation", "sum")))
        for i, component in enumerate(local):
            component.assign(tf.constant(mine[ranks.rank * len(local) + i], dtype=component.dtype))


def _local(model: keras.Model, variable: Any) -> list[Any]:
    """The parts of a variable in this process, one for each of its replicas."""
    return list(model.distribute_strategy.experimental_local_results(_raw(variable)))


def _rows_of_all_replicas(model: keras.Model, counts: list[Any], ranks: Ranks) -> list[np.ndarray]:
    mine = [np.stack([np.asarray(one.numpy()) for one in _local(model, variable)]) for variable in counts]
    if ranks.alone or not counts:
        return mine
    sizes = [rows.nbytes for rows in mine]
    packed: np.ndarray = np.zeros(-(-sum(sizes) // 8) * 8, np.uint8)
    packed[: sum(sizes)] = np.concatenate([rows.reshape(-1).view(np.uint8) for rows in mine])
    everyone: np.ndarray = ranks.gather(packed.view(np.int64)).view(np.uint8)
    found, start = [], 0
    for rows, size in zip(mine, sizes):
        parts = [one[start : start + size].copy().view(rows.dtype).reshape(rows.shape) for one in everyone]
        found.append(np.concatenate(parts))
        start += size
    return found


def _for_replicas(rows: np.ndarray, replicas: int, aggregation: str) -> np.ndarray:
    """Makes rows for another number of replicas: together they come to the same."""
    if len(rows) == replicas:
        return rows
    if "sum" in aggregation.lower():
        others: np.ndarray = np.zeros((replicas - 1, *rows.shape[1:]), rows.dtype)
        return np.concatenate([rows.sum(0, dtype=rows.dtype)[None], others])
    one = rows[0] if "first" in aggregation.lower() else rows.mean(0).astype(rows.dtype)
    return np.stack([one] * replicas)


def _require_same(variables: list[Any], values: list[np.ndarray], names: list[str], skipped: int) -> None:
    has = [f"{_raw(v).dtype.name}{list(v.shape)}" for v in variables]
    saved = [f"{value.dtype.name}{list(value.shape)}" for value in values]
    if has == saved:
        return
    at = next((i for i, (a, b) in enumerate(zip(has, saved)) if a != b), min(len(has), len(saved)))
    here = f"{getattr(variables[at], 'path', '')} {has[at]}" if at < len(has) else "no more variables"
    there = f"{names[at]} {saved[at]}" if at < len(saved) else "no more variables"
    raise UnsupportedError(
        explain(
            "The backup is that of another model or optimizer.",
            received=f"variable {skipped + at}: {here}",
            expected=f"{there}, as in the backup",
            do="Take another folder for another model. What only the first step makes (an optimizer of your own "
            "`train_step`) has to be built before `fit`: optimizer.build(variables).",
        )
    )
