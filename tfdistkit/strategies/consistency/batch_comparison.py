"""Compares the whole batches of `train_on_batch`, `test_on_batch` and `predict_on_batch` between the ranks.

Each replica takes its rows from the batch of its own rank. Where the batches differ (`np.random` without one seed for
all ranks), rows are lost. A comparison in every call would cost too much: it is made in the calls 1, 2, 4, 8 and so on.
Under an algorithm whose replicas train alone for a while (`LocalSGD`), it is made in the first call of `train_on_batch`
alone: a rank need not wait for its peers in the others.
"""

from __future__ import annotations

import collections
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency.batch_hashes import marks_of_whole, samples_of_whole
from tfdistkit.strategies.consistency.data_comparison import compared, is_compared
from tfdistkit.strategies.consistency.data_differences import other_calls, other_whole_batches
from tfdistkit.strategies.consistency.row_exchange import are_close, table_of_values
from tfdistkit.strategies.consistency.training_comparison import TrainingFacts

Facts = dict[str, Any]

_ARGUMENTS = ("x", "y", "sample_weight", "class_weight")

_FLOATS = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
# Values of each tensor that are exchanged where hashes differ.
_VALUES = 64

# By model: the number of calls of each method.
_calls: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


def comparing(call: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a hook of a method that takes a whole batch compare the batches of the ranks first.

    Args:
        call: The method: `train_on_batch`, `test_on_batch` or `predict_on_batch`.
        hook: The hook: called with Keras's method, the model and its arguments.

    Returns:
        A hook in its place.
    """

    def around(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = private_api.strategy_of(model)
        if private_api.is_ours(strategy) and tf.executing_eagerly() and is_compared(strategy):
            numbers = _calls.setdefault(model, collections.Counter())
            numbers[call] += 1
            if _is_due(strategy, call, numbers[call]):
                given = inspect.signature(original).bind(model, *args, **kwargs).arguments
                _compare(strategy, model, call, numbers[call], given)
        return hook(original, model, *args, **kwargs)

    return around


def _is_due(strategy: Any, call: str, number: int) -> bool:
    """Returns whether a call, counted from 1, compares."""
    if call == "train_on_batch" and strategy.reducer.is_local:
        return number == 1
    return number.bit_count() == 1  # A power of two.


def _compare(strategy: Any, model: Any, call: str, number: int, given: Facts) -> None:
    """Raises, on all ranks, the error for batches or trainings that differ."""
    training = TrainingFacts(model, at_start=number == 1) if call == "train_on_batch" else None
    batch = {name: given[name] for name in _ARGUMENTS if given.get(name) is not None}
    marks = {name: marks_of_whole(value) for name, value in batch.items()}
    trained = 0 if training is None else training.number()
    everyone = compared(strategy, {"call": f"{call}, call {number} of it", "batch": marks, "training": trained})
    if everyone is None:
        return
    for rank, facts in enumerate(everyone):
        if facts["call"] != everyone[0]["call"]:
            raise other_calls(everyone[0]["call"], facts["call"], rank)
        found = _other_structure(everyone[0]["batch"], facts["batch"])
        if found:
            raise other_whole_batches(call, number, rank, found)
    marks_of_ranks = [facts["batch"] for facts in everyone]
    if any(one != marks_of_ranks[0] for one in marks_of_ranks):
        _require_equal_values(strategy, call, number, batch, marks_of_ranks)
    if training is not None:
        training.require_equal(strategy, np.array([facts["training"] for facts in everyone], np.int64))


def _other_structure(first: Facts, own: Facts) -> str:
    """Describes a difference in the arguments of two calls, their shapes or dtypes; empty if there is none."""
    if first.keys() != own.keys():
        given = [", ".join(name for name in _ARGUMENTS if name in batch) for batch in (first, own)]
        return f"the arguments: {given[0]} on rank 0, {given[1]}"
    for name in first:
        kinds = [[f"{dtype} {shape}" for dtype, shape, *_ in batch[name]] for batch in (first, own)]
        if kinds[0] != kinds[1]:
            return f"shapes or dtypes of `{name}`: {', '.join(kinds[0])} on rank 0, {', '.join(kinds[1])}"
    return ""


def _require_equal_values(strategy: Any, call: str, number: int, batch: Facts, everyone: list[Facts]) -> None:
    """Raises the error for other values, unless it is rounding, or the random values of equal rows (augmentation)."""
    names = [name for name, marks in everyone[0].items() for _ in marks]
    of_ranks = [[mark for marks in one.values() for mark in marks] for one in everyone]
    are_floats = [dtype in _FLOATS for dtype, *_ in of_ranks[0]]
    samples = [
        sample if is_float else np.zeros(1) for sample, is_float in zip(samples_of_whole(batch, _VALUES), are_floats)
    ]
    values = table_of_values(strategy, samples, 2 * _VALUES)
    for rank in range(1, len(everyone)):
        others = [i for i, (a, b) in enumerate(zip(of_ranks[0], of_ranks[rank])) if a[2] != b[2]]
        same_rows = any(i not in others and mark[3] for i, mark in enumerate(of_ranks[0]))
        found = [i for i in others if not (are_floats[i] and (same_rows or are_close(values[0, i], values[rank, i])))]
        if found:
            different = ", ".join(dict.fromkeys(f"`{names[i]}`" for i in found))
            raise other_whole_batches(call, number, rank, f"the values of {different}")
