"""Checks that a model, its optimizers and its metrics were made where a strategy can train them.

TensorFlow finds a part that was made outside of `strategy.scope()` in the middle of a step, and names neither the part
nor the line. In a job of several processes it finds nothing where the whole model is outside: each process trains a
model of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

import tfdistkit
from tfdistkit import env
from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import registry
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api, private_names

# Frames of these packages are not the user's.
_PACKAGES = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (keras, tf, tfdistkit))
_DO_SCOPE = "with strategy.scope(): model = ...; model.compile(...)"

# The line of the user's that made a model in no strategy.
_made_at: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Model -> the functions that it had when it was found well: they are made anew by `compile`.
_checked: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()

# What TensorFlow says where a part of a step belongs to another strategy than the step.
_OF_TENSORFLOW = (
    "Mixing different tf.distribute",
    'Need to be inside "with strategy.scope()"',
    "Must not nest tf.distribute",
    "must only be passed a variable created in this tf.distribute",
)


def install() -> None:
    """Hooks what makes, compiles, trains and evaluates a model, around the hooks that are there."""
    private_names.hook("model_made", _note_line)
    private_names.hook("compile", _compile)
    private_names.hook("strategy_scope", _scope)
    private_names.hook("apply", _apply)
    for key in ("fit", "train_on_batch"):
        private_names.hook(key, functools.partial(_train_or_test, key, True))
    for key in ("evaluate", "test_on_batch"):
        private_names.hook(key, functools.partial(_train_or_test, key, False))
    for key in ("predict", "predict_on_batch"):
        private_names.hook(key, _in_clear_words)


def _note_line(original: Any, model: Any) -> None:
    original(model)
    if private_api.strategy_of(model) is None:
        _made_at[model] = line_of_user()


def _compile(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compiles in the scope of the model's strategy, where the optimizer's and the metrics' variables belong."""
    strategy = private_api.strategy_of(model)
    if not private_api.is_ours(strategy):
        return original(model, *args, **kwargs)
    _require_no_other_scope(strategy, "compile", model)
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    optimizer = given.get("optimizer")
    if isinstance(optimizer, keras.optimizers.Optimizer):
        require_own_optimizer(strategy, optimizer)
    metrics = keras.tree.flatten([given.get(name) for name in ("metrics", "weighted_metrics")])
    _require_own_metrics(strategy, metrics)
    with strategy.scope():
        return original(model, *args, **kwargs)


def _scope(original: Any, strategy: Any) -> Any:
    """Refuses the scope of one strategy inside of that of another."""
    current: Any = tf.distribute.get_strategy() if tf.distribute.has_strategy() else strategy
    if current is not strategy and (private_api.is_ours(current) or private_api.is_ours(strategy)):
        raise UnsupportedError(
            explain(
                "A strategy's scope stands inside the scope of another strategy.",
                received=f"{_name(strategy)} inside {_name(current)}, at {line_of_user()}",
                expected="one strategy a script",
                do="Remove one of the two `with ....scope():`.",
            )
        )
    scope = original(strategy)
    return _without_legacy_keras(scope) if private_api.is_ours(strategy) and "tf_keras" in sys.modules else scope


@contextlib.contextmanager
def _without_legacy_keras(scope: Any) -> Iterator[Any]:
    """Refuses models of Keras 2 in a scope: what is done for Keras 3 does not reach them."""

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        frame: Any = inspect.currentframe()
        while frame is not None:
            if _is_of_legacy_keras(frame):
                raise UnsupportedError(
                    explain(
                        "A model of `tf_keras` (Keras 2) stands in the scope of a tfdistkit strategy.",
                        received=f"a variable of `tf_keras`, made at {line_of_user()}",
                        expected="Keras 3: `import keras`, or `tf.keras` without TF_USE_LEGACY_KERAS",
                        do="Make the model with `keras`, or train it under TensorFlow's own strategy.",
                    )
                )
            frame = frame.f_back
        return next_creator(**kwargs)

    with scope as entered, tf.variable_creator_scope(create):
        yield entered


def _apply(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """In loops of the user's own, while they are traced: `fit` has looked before."""
    strategy: Any = tf.distribute.get_strategy()
    if private_api.is_ours(strategy) and tf.inside_function():
        require_own_optimizer(strategy, optimizer)
    return original(optimizer, *args, **kwargs)


def _train_or_test(method: str, trains: bool, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    functions = (getattr(model, "train_function", None), getattr(model, "test_function", None))
    known = _checked.get(model)
    if known is None or known != functions or functions[0 if trains else 1] is None:
        _check(model, method, trains)
    result = _in_clear_words(original, model, *args, **kwargs)
    if method.endswith("on_batch"):
        # Looked at again when `compile` has made another.
        _checked[model] = (getattr(model, "train_function", None), getattr(model, "test_function", None))
    return result


def _check(model: Any, method: str, trains: bool) -> None:
    strategy = private_api.strategy_of(model)
    if not private_api.is_ours(strategy):
        _require_member(model, method)
        if trains:
            _require_no_scope_of_ours(model, method)
        return
    _require_no_other_scope(strategy, method, model)
    if trains:
        _require_own_weights(strategy, model)
        for optimizer in _optimizers(model):
            require_own_optimizer(strategy, optimizer)
    _require_own_metrics(strategy, model.metrics)


def _require_member(model: Any, method: str) -> None:
    """Raises:
    UnsupportedError: if this process is one of several that train together, and the model takes no part in it.
    """
    last = registry.last_made()
    if last is None or private_api.strategy_of(model) is last.strategy or env.text(env.OWN_MODELS) == "1":
        return
    cluster = detect_cluster()
    if not cluster.is_training or not (cluster.world_size > 1 or cluster.has_servers):
        return
    who = "the coordinator" if cluster.is_coordinator else f"rank {cluster.rank} of {cluster.world_size}"
    line = line_of_user()
    raise UnsupportedError(
        explain(
            f"`{method}` of a model that is in no strategy of this job: {who} would use it alone, and the other "
            "processes one of their own, or none.",
            received=f"{_told(model)}; `{method}` at {line}",
            expected=f"{_DO_SCOPE}, with the strategy that `tfdistkit.strategy(...)` returned",
            do=f"{_move(model)} If this process shall have a model of its own, set {env.OWN_MODELS}=1.",
        )
    )


def _move(model: Any) -> str:
    line = _made_at.get(model)
    if line is None and private_api.strategy_of(model) is None:
        return "Make the strategy first, at the top of the script, and the model in its scope."
    return f"Move {line or 'the line that makes the model'} into `with strategy.scope():`."


def _told(model: Any) -> str:
    made_in, line = private_api.strategy_of(model), _made_at.get(model)
    if made_in is not None:
        return f"the model {model.name!r}, made in the scope of {_name(made_in)}"
    return f"the model {model.name!r}, made " + (f"outside of a scope at {line}" if line else "before the strategy")


def _require_no_scope_of_ours(model: Any, method: str) -> None:
    """A model that was made in no scope of ours cannot be trained inside of one, nor with what was made there."""
    strategy: Any = tf.distribute.get_strategy()
    if private_api.is_ours(strategy):
        found = f"`{method}` in the scope of {_name(strategy)}"
    else:
        made = [variable for one in _optimizers(model) for variable in one.variables]
        owners = [private_api.owner_of(private_api.raw_variable(variable)) for variable in made]
        owners += [
            raw.distribute_strategy
            for raw in map(private_api.raw_variable, model.trainable_variables)
            if isinstance(raw, tf.distribute.DistributedValues) and len(raw.values) > 1
        ]
        owner = next(filter(private_api.is_ours, owners), None)
        if owner is None:
            return
        found = f"its layers or its optimizer in the scope of {_name(owner)}"
    raise UnsupportedError(
        explain(
            f"`{method}` of a model that was not made in the scope of the strategy.",
            received=f"{_told(model)}; {found}",
            expected=_DO_SCOPE,
            do=_move(model),
        )
    )


def _optimizers(model: Any) -> list[Any]:
    """A GAN has several of them, by names of its own."""
    return [one for one in vars(model).values() if isinstance(one, keras.optimizers.Optimizer)]


def _require_no_other_scope(strategy: Any, method: str, model: Any) -> None:
    current: Any = tf.distribute.get_strategy() if tf.distribute.has_strategy() else strategy
    if current is strategy:
        return
    raise UnsupportedError(
        explain(
            f"`{method}` in the scope of another strategy than that of the model.",
            received=f"the model {model.name!r} of one {_name(strategy)}, in the scope of another {_name(current)}"
            if type(current) is type(strategy)
            else f"the model {model.name!r} of {_name(strategy)}, in the scope of {_name(current)}",
            expected="one strategy a script, which makes, compiles and trains the model",
            do=f"Call `{method}` outside of a scope, or in that of the model's strategy.",
        )
    )


def _require_own_weights(strategy: Any, model: Any) -> None:
    outside = _outside(strategy, model.trainable_variables)
    if not outside:
        return
    layers = [
        layer.name
        for layer in model.layers
        if any(one is variable for one in layer.trainable_variables for variable in outside)
    ]
    more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
    raise UnsupportedError(
        explain(
            "Weights of the model were made outside of the scope of its strategy, which cannot train them.",
            received=f"{outside[0].path}{more}, in: {', '.join(layers) or model.name}",
            expected="layers built in the scope, or frozen ones (`layer.trainable = False`)",
            do="Make these layers, and what calls or builds them first, in `with strategy.scope():`; give a model that "
            "was made before its weights there: `keras.models.clone_model(model)`, then `set_weights`.",
        )
    )


def require_own_optimizer(strategy: Any, optimizer: Any) -> None:
    """Checks that an optimizer was made in the scope of a strategy.

    Args:
        strategy: The strategy that trains.
        optimizer: A Keras optimizer.

    Raises:
        UnsupportedError: if the strategy cannot update its variables.
    """
    if not _outside(strategy, optimizer.variables):
        return
    name = type(optimizer).__name__
    raise UnsupportedError(
        explain(
            "The optimizer was made outside of the scope of the model's strategy: its variables are elsewhere.",
            received=f"{name} {optimizer.name!r} for {_name(strategy)}",
            expected=f"`with strategy.scope(): model.compile(optimizer=keras.optimizers.{name}(...), ...)`",
            do=f"Move the line that makes the {name} into `with strategy.scope():`.",
        )
    )


def _require_own_metrics(strategy: Any, metrics: Iterable[Any]) -> None:
    """Several replicas can only add up a metric whose variables the strategy made."""
    if registry.process_count(strategy) == 1 and strategy.num_replicas_in_sync == 1:
        return
    for metric in metrics:
        if isinstance(metric, keras.metrics.Metric) and _outside(strategy, metric.variables):
            name = type(metric).__name__
            raise UnsupportedError(
                explain(
                    "A metric was made outside of the scope of the model's strategy: each replica would count its own "
                    "rows only.",
                    received=f"{name} {metric.name!r} for {_name(strategy)}",
                    expected=f"`with strategy.scope(): model.compile(..., metrics=[keras.metrics.{name}(...)])`, or "
                    "its name as a string",
                    do=f"Move the line that makes the {name} into `with strategy.scope():`.",
                )
            )


def _outside(strategy: Any, variables: Iterable[Any]) -> list[Any]:
    """Returns the Keras variables whose TensorFlow variable another strategy made, or none."""
    found = [(variable, private_api.raw_variable(variable)) for variable in variables]
    return [variable for variable, raw in found if raw is not None and not private_api.is_of(strategy, raw)]


def _in_clear_words(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Says in our words what TensorFlow says of strategies that do not fit."""
    try:
        return original(model, *args, **kwargs)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, UnsupportedError) or not any(sign in str(error) for sign in _OF_TENSORFLOW):
            raise
        strategy = private_api.strategy_of(model)
        if not any(map(private_api.is_ours, (strategy, tf.distribute.get_strategy()))):
            raise
        raise UnsupportedError(
            explain(
                "A step uses a variable, an optimizer or a metric that was not made in the scope of the model's "
                "strategy.",
                received=f"the model {model.name!r} of {_name(strategy)}; {str(error)[:200]}",
                expected="everything that a step updates to be made in one scope",
                do="Move the lines that make it into `with strategy.scope():`.",
            )
        ) from error


def _name(strategy: Any) -> str:
    if strategy is None:
        return "no strategy"
    module = "" if private_api.is_ours(strategy) else type(strategy).__module__.partition(".")[0] + "'s "
    return module + type(strategy).__name__


def line_of_user() -> str:
    """Returns the file and line, outside of Keras, TensorFlow and this package, from which this was called.

    Returns:
        Such as `train.py:12`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGES) and not file.startswith("<") and not _is_of_legacy_keras(frame):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def _is_of_legacy_keras(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "tf_keras"
