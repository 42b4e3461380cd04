"""Compares the models of the ranks: learning rates, losses, layers and weights, when `fit` or `evaluate` begin.

What one rank alone changes (`load_weights` under `if rank == 0`, a learning rate, a loss or a rate of dropout by rank)
lets the ranks train different models without an error. Each rank sends a hash with its position, learning rates also in
each epoch; equal ranks exchange no more.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import re
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.errors import DivergenceError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency.batch_hashes import mark_of_values, sampled_values
from tfdistkit.strategies.consistency.data_comparison import compared
from tfdistkit.strategies.consistency.row_exchange import are_close, table, table_of_values

Facts = dict[str, Any]

# Sampled values of a weight: up to twice as many, because they are evenly spaced.
_OF_WEIGHT = 16
# Weights that are sampled, because reading one takes as long as thousands of its values: every third of a ResNet50. And
# those of them whose values are exchanged where hashes differ.
_MOST_WEIGHTS, _MOST_EXCHANGED = 128, 64
# Differences of learning rates that come from the rounding of other processors.
_ROUNDING = 1e-6

_PLAIN = (bool, int, float, str)
# What is described by its configuration.
_CONFIGURED = (keras.Regularizer, keras.constraints.Constraint)
# Arguments of layers that may differ: Keras numbers names in each process, and each rank may draw its random numbers.
_OF_PROCESS = {"self", "name", "seed"}
# The arguments of `compile` that must be equal on all ranks. Metrics are added up by their order.
_COMPILED = {"losses": ("loss", "loss_weights"), "metrics": ("metrics", "weighted_metrics")}
# The name of the tokens of a layer that looks them up, beside the arguments of its class.
_VOCABULARY = "vocabulary"

_OFF = "tfdistkit.strategy(..., check_data=False) turns this comparison off."
_LOAD = (
    "Load weights on all ranks, not under `if rank == 0`, or put tfdistkit.callbacks.BroadcastVariables(root_rank=0) "
    "first in `callbacks`."
)
_SORT = (
    "Give the layer its tokens in the same order on all ranks: a set of strings has another order in each process, so "
    "`sorted(set(words))`; and adapt it to the same data."
)
_COMPILE = (
    "Call `compile` with the same arguments on all ranks, in the same order: a set of strings has another order in "
    "each process."
)
_ORDER = (
    "Make the layers, and pass their outputs on, in the same order on all ranks: a set of strings has another order in "
    "each process, so `sorted(set(columns))`."
)
_SET_RATE = "Set the same learning rate on all ranks: one that does not depend on the rank, its files or its data."


class TrainingFacts:
    """The facts about a training that must be equal on all ranks, at one moment.

    Args:
        model: The model.
        at_start: Whether the training begins: then all of it is compared, not the learning rates alone.
    """

    def __init__(self, model: Any, at_start: bool):
        self._model = model
        self.facts: Facts = {"rates": _rates(model)}
        if at_start:
            given = private_api.compile_arguments(model)
            self.facts |= {name: [_described(given.get(one)) for one in of] for name, of in _COMPILED.items()}
            self.facts |= {"layers": _layers(model), "names": _names(model), "connections": _connections(model)}
            self.facts["weights"] = self._digest()

    def number(self) -> int:
        """Returns a hash of the facts."""
        text = json.dumps(self.facts, sort_keys=True, default=str).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")

    def require_equal(self, strategy: Any, numbers: np.ndarray) -> None:
        """Compares the facts of all ranks; all of them call it.

        Args:
            strategy: The strategy.
            numbers: The result of `number` on each rank.

        Raises:
            DivergenceError: on all ranks, if they differ by more than rounding.
        """
        if (numbers == numbers[0]).all():
            return
        everyone = compared(strategy, self.facts, always=True) or []
        for rank, facts in enumerate(everyone):
            _require_equal_settings(everyone[0], facts, rank)
        if all(facts.get("weights") for facts in everyone):
            self._require_equal_weights(strategy)

    def _digest(self) -> list[int] | None:
        """Returns the number of compared weights and a hash of them; None while each replica has its own."""
        strategy = self._model.distribute_strategy
        if not strategy.has_equal_weights():
            return None
        samples = [_sampled(weight) for weight in _weights_of(self._model)]
        digest = hashlib.blake2b(b"".join(sample.tobytes() for sample in samples), digest_size=7)
        return [len(samples), int.from_bytes(digest.digest(), "little")]

    def _require_equal_weights(self, strategy: Any) -> None:
        weights = _weights_of(self._model)
        samples = [_sampled(weight) for weight in weights]
        marks = table(strategy, np.array([mark_of_values(sample) for sample in samples], np.int64))
        other = np.flatnonzero((marks != marks[0]).any(axis=0))[:_MOST_EXCHANGED]
        if not len(other):
            return
        values = table_of_values(strategy, [samples[index] for index in other], 2 * _OF_WEIGHT)
        for rank in range(1, len(values)):
            for place, index in enumerate(other):
                if not are_close(values[0, place], values[rank, place]):
                    raise _weights_differ(str(weights[index].path), rank, values[0, place], values[rank, place])


def samples_of(weights: list[Any]) -> list[tuple[str, list[float]]]:
    """Returns the paths of weights, and some of their values.

    Args:
        weights: Variables of Keras or TensorFlow.
    """
    chosen = [one for one in _chosen(weights) if _is_real(one)][:_MOST_EXCHANGED]
    return [(getattr(one, "path", one.name), _sampled(one).astype(np.float64).tolist()) for one in chosen]


def require_equal_samples(everyone: list[list[tuple[str, list[float]]]]) -> None:
    """Requires weights to be the same on all ranks, but for rounding.

    Args:
        everyone: The result of `samples_of` on each rank.

    Raises:
        DivergenceError: for the first weight that differs.
    """
    for rank, of_rank in enumerate(everyone):
        for (path, first), (_, own) in zip(everyone[0], of_rank):
            values = np.array(first), np.array(own)
            if len(first) == len(own) and not are_close(*values):
                raise _weights_differ(path, rank, *values)


def _is_real(weight: Any) -> bool:
    return keras.backend.is_float_dtype(weight.dtype)


def _weights_of(model: Any) -> list[Any]:
    """Returns weights of a model that are equal on all replicas, evenly spaced in its list, the first and the last.

    Metrics and seeds are none of its weights.
    """
    return _chosen(model.weights)


def _chosen(weights: list[Any]) -> list[Any]:
    on_read = tf.VariableSynchronization.ON_READ
    found = []
    for weight in weights:
        raw = _raw(weight)
        if raw is not None and weight.dtype != "string" and getattr(raw, "synchronization", None) != on_read:
            found.append(weight)
    chosen = np.unique(np.linspace(0, len(found) - 1, min(len(found), _MOST_WEIGHTS)).astype(np.int64))
    return [found[index] for index in chosen]


def _raw(weight: Any) -> Any:
    return private_api.raw_variable(weight) if isinstance(weight, keras.Variable) else weight


def _sampled(weight: Any) -> np.ndarray:
    raw = _raw(weight)
    local = raw.values[0] if isinstance(raw, tf.distribute.DistributedValues) else raw
    return sampled_values(local.read_value(), _OF_WEIGHT)


def _rates(model: Any) -> list[Any]:
    """Returns the class and the learning rate of each optimizer; a schedule by its configuration."""
    found = []
    for one in vars(model).values():
        if not isinstance(one, keras.optimizers.Optimizer):
            continue
        inner = getattr(one, "inner_optimizer", one)
        try:
            rate = inner.get_config().get("learning_rate")
        except Exception:  # A user's optimizer without a configuration.
            rate = None
        found.append([type(inner).__name__, rate if isinstance(rate, (int, float, dict)) else None])
    return found


def _layers(model: Any) -> list[Any]:
    """Describes Keras's own layers, such as the rate of `Dropout`; those of the user may know their rank."""
    layers = [one for one in private_api.layers_of(model) if type(one).__module__.startswith("keras.src.layers.")]
    # A loaded model has an input layer where one that was built by its first batch may have none.
    layers = [one for one in layers if not isinstance(one, keras.layers.InputLayer)]
    return [[type(one).__name__, bool(one.trainable), _arguments_of(one)] for one in layers]


def _names(model: Any) -> list[str]:
    """Returns the names of layers that are not numbered by Keras, in the order of the layers."""
    return [one.name for one in private_api.layers_of(model) if not _is_numbered(one.name, type(one).__name__)]


def _is_numbered(name: str, kind: str) -> bool:
    return re.sub(r"_\d+$", "", name).replace("_", "") == kind.replace("_", "").lower()


def _connections(model: Any) -> list[Any]:
    """Describes which layers of each functional model get the outputs of which, by their places."""
    models = [one for one in private_api.layers_of(model) if isinstance(one, keras.Model)]
    return [_connections_of(one) for one in models if hasattr(one, "operations")]


def _connections_of(model: Any) -> Any:
    """Returns, for each call of a layer, the places of what it gets and the numbers that it is called with."""
    made, calls = set[int](), list[Any]()

    def is_taken(call: Any) -> bool:
        if not all(id(one) in made for one in call.arguments.keras_tensors):
            return False
        made.update(id(output) for output in call.outputs)
        calls.append(call)
        return True

    waiting, before = [call for one in model.operations for call in private_api.calls_of(one)], 0
    while len(waiting) != before:  # A layer may be called again with what a later one makes, or for another model.
        before, waiting = len(waiting), [call for call in waiting if not is_taken(call)]
    places = {id(output): (place, i) for place, call in enumerate(calls) for i, output in enumerate(call.outputs)}
    found = []
    for call in calls:
        given = keras.tree.flatten((call.arguments.args, call.arguments.kwargs))
        inputs = [places[id(one)] for one in call.arguments.keras_tensors]
        found.append([inputs, [one for one in given if type(one) in (int, float)]])
    return [found, [places.get(id(one)) for one in model.outputs]]


def _arguments_of(layer: Any) -> dict[str, Any]:
    own, names = vars(layer), _parameters_of(layer.__class__)
    known = (*_PLAIN, types.FunctionType, *_CONFIGURED)
    given = {name: own[name] for name in names if name in own}
    found = {name: _described(one) for name, one in given.items() if isinstance(one, known) or _is_penalty(name)}
    return found | ({_VOCABULARY: _tokens_of(layer)} if hasattr(layer, "get_vocabulary") else {})


def _is_penalty(name: str) -> bool:
    return name.endswith(("_regularizer", "_constraint"))  # None where another rank has one.


def _tokens_of(layer: Any) -> str:
    """Describes the vocabulary of a layer that looks tokens up (`StringLookup`, `TextVectorization`) by its order."""
    try:
        tokens = [str(one) for one in layer.get_vocabulary()]
    except Exception:  # It has none yet.
        return "none"
    digest = hashlib.sha256("\0".join(tokens).encode()).hexdigest()[:8]
    return f"{', '.join(tokens[:4])}, ... ({len(tokens)} tokens, hash {digest})"


@functools.cache
def _parameters_of(kind: Any) -> tuple[str, ...]:
    return tuple(sorted(set(inspect.signature(kind.__init__).parameters) - _OF_PROCESS))


def _described(value: Any) -> Any:
    """Describes what `compile` or a layer was given: equal on all ranks if it is the same code."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {str(key): _described(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(one) for one in value]
    if isinstance(value, types.FunctionType):
        code, numbers = value.__code__, [one for one in value.__code__.co_consts if isinstance(one, _PLAIN)]
        text = code.co_code + repr((code.co_names, numbers)).encode()
        return [value.__name__, hashlib.sha256(text).hexdigest()[:8]]
    own = vars(value) if isinstance(value, keras.Loss) else {}  # `get_config` lacks arguments, such as Huber's `delta`.
    is_of_keras = type(value).__module__.startswith("keras.src.metrics.")
    own = _config_of(value) if is_of_keras or isinstance(value, _CONFIGURED) else own
    arguments = {name: _described(one) for name, one in own.items() if isinstance(one, (*_PLAIN, dict))}
    arguments.pop("name", None)  # Keras may number the names in each process.
    return [getattr(value, "__name__", type(value).__name__), arguments]


def _config_of(made: Any) -> dict[str, Any]:
    """Returns the numbers and texts in the configuration of a metric, a regularizer or a constraint."""
    try:
        config = made.get_config()
    except Exception:  # It holds what has none, such as a function, or is the user's own.
        return {}
    # Functions are written with the path of their file, which differs between hosts.
    return {name: one for name, one in config.items() if one is None or isinstance(one, _PLAIN)}


def _require_equal_settings(first: Facts, own: Facts, rank: int) -> None:
    """Raises the error for the first setting in which a rank differs from rank 0."""
    if not _same_rates(first["rates"], own["rates"]):
        raise _differs("learning rates", f"{_named(first['rates'])} on rank 0, {_named(own['rates'])} on rank {rank}",
                       _SET_RATE)  # fmt: skip
    for what, names in _COMPILED.items():
        if first.get(what) != own.get(what):
            received = f"{first.get(what)} on rank 0, {own.get(what)} on rank {rank}: `{names[0]}` and `{names[1]}`"
            raise _differs(what, received, _COMPILE)
    for layer, other in itertools.zip_longest(first.get("layers", ()), own.get("layers", ())):
        if not _same_layers(layer, other):
            if layer and other and _same_layers(_without_tokens(layer), _without_tokens(other)):
                received = f"{layer[0]} of {layer[2][_VOCABULARY]} on rank 0, of {other[2][_VOCABULARY]} on rank {rank}"
                raise _differs("vocabularies", received, _SORT)
            raise _differs("layers", f"{layer} on rank 0, {other} on rank {rank}",
                           "Make the same model on all ranks, with the same arguments of its layers.")  # fmt: skip
    _require_equal_order(first, own, rank)
    counts = [(one.get("weights") or [0])[0] for one in (first, own)]
    if counts[0] != counts[1]:
        raise _differs("weights", f"{counts[0]} weights on rank 0, {counts[1]} on rank {rank}",
                       "Make and build the same model on all ranks.")  # fmt: skip


def _require_equal_order(first: Facts, own: Facts, rank: int) -> None:
    names, others = first.get("names", []), own.get("names", [])
    if names != others and sorted(names) == sorted(others):
        place = next(place for place, pair in enumerate(zip(names, others)) if pair[0] != pair[1])
        received = f"{names[place]!r} on rank 0 is {others[place]!r} on rank {rank}"
        raise _differs("layers", f"the same layers in another order: {received}", _ORDER)
    if first.get("connections") != own.get("connections"):
        received = f"layers of the functional model get the outputs of others on rank {rank} than on rank 0"
        raise _differs("connections of layers", received, _ORDER)


def _without_tokens(layer: list[Any]) -> list[Any]:
    return [*layer[:2], {name: one for name, one in layer[2].items() if name != _VOCABULARY}]


def _same_layers(first: list[Any] | None, own: list[Any] | None) -> bool:
    if first is None or own is None or first[:2] != own[:2]:
        return False
    # A layer that was loaded may lack an argument, or have it in another type.
    return all(first[2][name] == own[2][name] for name in first[2].keys() & own[2].keys())


def _same_rates(first: list[Any], own: list[Any]) -> bool:
    if len(first) != len(own):
        return False
    for (kind, rate), (other_kind, other) in zip(first, own):
        are_numbers = isinstance(rate, (int, float)) and isinstance(other, (int, float))
        is_same = np.isclose(rate, other, _ROUNDING, 0.0, True) if are_numbers else rate == other
        if kind != other_kind or not is_same:
            return False
    return True


def _named(rates: list[Any]) -> str:
    shown = (f"{kind}: {rate:.6g}" if isinstance(rate, (int, float)) else f"{kind}: {rate}" for kind, rate in rates)
    return ", ".join(shown) or "no optimizer"


def _weights_differ(path: str, rank: int, first: np.ndarray, own: np.ndarray) -> DivergenceError:
    largest = float(np.nanmax(np.abs(own - first), initial=0.0))
    return _differs("weights", f"`{path}` on rank {rank} differs from that on rank 0 by up to {largest:.3g}", _LOAD)


def _differs(what: str, received: str, do: str) -> DivergenceError:
    return DivergenceError(
        explain(
            f"All ranks must have the same model and train it in the same way, but their {what} differ.",
            received=received,
            expected=f"the same {what} on all ranks when `fit`, `predict` or a loop begins, and in each epoch",
            do=f"{do} {_OFF}",
        )
    )
