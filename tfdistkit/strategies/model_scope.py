"""Checks that a model, its optimizers and its metrics were made in the scope of the strategy that trains them.

For a part made outside of `strategy.scope()`, TensorFlow raises an error in the middle of a step that names neither the
part nor the line. For a whole model outside of the scope it raises none: each process of a job trains its own model.
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

from tfdistkit import env
from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import registry
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api, private_lookup
from tfdistkit.report import tracebacks
from tfdistkit.strategies.metrics import metrics_of_step
from tfdistkit.strategies.sync import custom_steps

_DO_SCOPE = "with strategy.scope(): model = ...; model.compile(...)"

# The user's line that made a model outside of any strategy.
_made_at: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Model -> its train and test function at the last check, which `compile` replaces.
_checked: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
# Optimizers whose variables are of the strategy of this process.
_members: weakref.WeakSet[Any] = weakref.WeakSet()

# Parts of TensorFlow's errors for a step that uses a variable of another strategy.
_OF_TENSORFLOW = (
    "Mixing different tf.distribute",
    'Need to be inside "with strategy.scope()"',
    "Must not nest tf.distribute",
    "must only be passed a variable created in this tf.distribute",
)


def install() -> None:
    """Hooks the methods that make, compile, train and evaluate a model, around existing hooks."""
    private_lookup.hook("model_made", _record_line)
    private_lookup.hook("compile", _compile)
    private_lookup.hook("strategy_scope", _scope)
    private_lookup.hook("apply", _apply)
    for key in ("fit", "train_on_batch"):
        private_lookup.hook(key, functools.partial(_train_or_test, key, True))
    for key in ("evaluate", "test_on_batch"):
        private_lookup.hook(key, functools.partial(_train_or_test, key, False))
    for key in ("predict", "predict_on_batch"):
        private_lookup.hook(key, _with_explained_errors)


def _record_line(original: Any, model: Any) -> None:
    original(model)
    if private_api.strategy_of(model) is None:
        _made_at[model] = line_of_user()


def _compile(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compiles in the scope of the model's strategy, so that optimizers and metrics make their variables there."""
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
    """Refuses the scope of a strategy inside the scope of another one."""
    current: Any = tf.distribute.get_strategy() if tf.distribute.has_strategy() else strategy
    if current is not strategy and (private_api.is_ours(current) or private_api.is_ours(strategy)):
        raise UnsupportedError(
            explain(
                "A strategy's scope must not be inside the scope of another strategy.",
                received=f"{_name(strategy)} inside {_name(current)}, at {line_of_user()}",
                expected="one strategy per script",
                do="Remove one of the two `with ....scope():`.",
            )
        )
    scope = original(strategy)
    return _without_legacy_keras(scope) if private_api.is_ours(strategy) and "tf_keras" in sys.modules else scope


@contextlib.contextmanager
def _without_legacy_keras(scope: Any) -> Iterator[Any]:
    """Refuses models of Keras 2 in a scope: our hooks patch Keras 3 only."""

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        frame: Any = inspect.currentframe()
        while frame is not None:
            if _is_of_legacy_keras(frame):
                raise UnsupportedError(
                    explain(
                        "A model in the scope of a tfdistkit strategy must not be one of `tf_keras` (Keras 2).",
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
    """Checks the optimizer of a custom loop while it is traced; `fit` has its own check."""
    strategy: Any = tf.distribute.get_strategy()
    if private_api.is_ours(strategy) and tf.inside_function():
        require_own_optimizer(strategy, optimizer)
    elif not tf.distribute.has_strategy() and optimizer not in _members:
        _require_member_variables(optimizer, *args, **kwargs)
    is_in_run = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if not is_in_run and not metrics_of_step.is_building():
        _require_run(*args, **kwargs)
    return original(optimizer, *args, **kwargs)


def _require_run(grads: Any, trainable_variables: Any = None) -> None:
    process, last = _process_of_job(), registry.last_made()
    if process is not None and last is not None and registry.process_count(last.strategy) > 1:
        custom_steps.require_run(process, line_of_user(), grads)


def _require_member_variables(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Raises:
    UnsupportedError: if this process is one of several of a job, and no variable is one of its strategy.
    """
    process, last = _process_of_job(), registry.last_made()
    if process is None or last is None:
        return
    variables = private_api.variables_of(optimizer) if trainable_variables is None else list(trainable_variables)
    raws = [private_api.raw_variable(one) if isinstance(one, keras.Variable) else one for one in variables]
    if not raws or any(raw is None or private_api.is_of(last.strategy, raw) for raw in raws):
        _members.add(optimizer)
        return
    name, first = type(optimizer).__name__, getattr(variables[0], "path", "")
    raise UnsupportedError(
        explain(
            f"`apply` of an optimizer needs variables that were made in the scope of this job's strategy: {process} "
            "would train these alone.",
            received=f"{len(variables)} variables for the {name}, the first {first!r}; `apply` at {line_of_user()}",
            expected="with strategy.scope(): model = ...; optimizer = ..., and `strategy.run(step, args=...)`",
            do="Move the lines that make the model and the optimizer into `with strategy.scope():`, and let "
            f"`strategy.run` call the step. To train a separate model in this process, set {env.OWN_MODELS}=1.",
        )
    )


def _train_or_test(method: str, trains: bool, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    functions = (getattr(model, "train_function", None), getattr(model, "test_function", None))
    known = _checked.get(model)
    if known is None or known != functions or functions[0 if trains else 1] is None:
        _check(model, method, trains)
    result = _with_explained_errors(original, model, *args, **kwargs)
    if method.endswith("on_batch"):
        # Checked again after `compile` has replaced them.
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
    UnsupportedError: if this process is one of several of a job, and the model is not in the scope of its strategy.
    """
    process, last = _process_of_job(), registry.last_made()
    if process is None or last is None or private_api.strategy_of(model) is last.strategy:
        return
    line = line_of_user()
    raise UnsupportedError(
        explain(
            f"`{method}` needs a model that was made in the scope of this job's strategy: {process} would use this "
            "model alone.",
            received=f"{_description(model)}; `{method}` at {line}",
            expected=f"{_DO_SCOPE}, with the strategy that `tfdistkit.strategy(...)` returned",
            do=f"{_move(model)} To use a separate model in this process, set {env.OWN_MODELS}=1.",
        )
    )


def _process_of_job() -> str | None:
    """Returns which process of a job this is; None if it is the only one, has no strategy, or may train alone."""
    if registry.last_made() is None or env.text(env.OWN_MODELS) == "1":
        return None
    cluster = detect_cluster()
    if not cluster.is_training or not (cluster.world_size > 1 or cluster.has_servers):
        return None
    return "the coordinator" if cluster.is_coordinator else f"rank {cluster.rank} of {cluster.world_size}"


def _move(model: Any) -> str:
    line = _made_at.get(model)
    if line is None and private_api.strategy_of(model) is None:
        return "Make the strategy first, at the top of the script, and the model in its scope."
    return f"Move {line or 'the line that makes the model'} into `with strategy.scope():`."


def _description(model: Any) -> str:
    made_in, line = private_api.strategy_of(model), _made_at.get(model)
    if made_in is not None:
        return f"the model {model.name!r}, made in the scope of {_name(made_in)}"
    return f"the model {model.name!r}, made " + (f"outside of a scope at {line}" if line else "before the strategy")


def _require_no_scope_of_ours(model: Any, method: str) -> None:
    """Refuses to train a model made outside of our scopes in such a scope, or with layers or optimizers made there."""
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
            f"`{method}` needs a model that was made in the scope of the strategy.",
            received=f"{_description(model)}; {found}",
            expected=_DO_SCOPE,
            do=_move(model),
        )
    )


def _optimizers(model: Any) -> list[Any]:
    """Returns all optimizers of a model; a GAN has several, in attributes of any name."""
    return [one for one in vars(model).values() if isinstance(one, keras.optimizers.Optimizer)]


def _require_no_other_scope(strategy: Any, method: str, model: Any) -> None:
    current: Any = tf.distribute.get_strategy() if tf.distribute.has_strategy() else strategy
    if current is strategy:
        return
    raise UnsupportedError(
        explain(
            f"`{method}` must not be called in the scope of a strategy other than the model's.",
            received=f"the model {model.name!r} of one {_name(strategy)}, in the scope of another {_name(current)}"
            if type(current) is type(strategy)
            else f"the model {model.name!r} of {_name(strategy)}, in the scope of {_name(current)}",
            expected="one strategy per script, which makes, compiles and trains the model",
            do=f"Call `{method}` outside of any scope, or in the scope of the model's strategy.",
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
            "Trainable weights of a model must be made in the scope of its strategy.",
            received=f"{outside[0].path}{more}, in: {', '.join(layers) or model.name}",
            expected="layers built in the scope, or frozen ones (`layer.trainable = False`)",
            do="Make these layers, and build them, in `with strategy.scope():`. To move an existing model there, call "
            "`keras.models.clone_model(model)` in the scope, then `set_weights`.",
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
            "The optimizer must be made in the scope of the model's strategy.",
            received=f"{name} {optimizer.name!r} for {_name(strategy)}",
            expected=f"`with strategy.scope(): model.compile(optimizer=keras.optimizers.{name}(...), ...)`",
            do=f"Move the line that makes the {name} into `with strategy.scope():`.",
        )
    )


def _require_own_metrics(strategy: Any, metrics: Iterable[Any]) -> None:
    """Refuses metrics made outside of the strategy's scope, whose state several replicas cannot sum."""
    if registry.process_count(strategy) == 1 and strategy.num_replicas_in_sync == 1:
        return
    for metric in metrics:
        if isinstance(metric, keras.metrics.Metric) and _outside(strategy, metric.variables):
            name = type(metric).__name__
            raise UnsupportedError(
                explain(
                    "A metric must be made in the scope of the model's strategy, or each replica counts only its own "
                    "rows.",
                    received=f"{name} {metric.name!r} for {_name(strategy)}",
                    expected=f"`with strategy.scope(): model.compile(..., metrics=[keras.metrics.{name}(...)])`, or "
                    "its name as a string",
                    do=f"Move the line that makes the {name} into `with strategy.scope():`.",
                )
            )


def _outside(strategy: Any, variables: Iterable[Any]) -> list[Any]:
    """Returns the variables of Keras or TensorFlow that were made outside of the strategy's scope."""
    found = [(variable, private_api.raw_variable(variable)) for variable in variables]
    return [variable for variable, raw in found if raw is not None and not private_api.is_of(strategy, raw)]


def _with_explained_errors(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of Keras, and replaces TensorFlow's errors about variables of other strategies."""
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
                "Every variable, optimizer and metric that a step uses must be made in the scope of the model's "
                "strategy.",
                received=f"the model {model.name!r} of {_name(strategy)}; {str(error)[:200]}",
                do="Move the lines that make them into `with strategy.scope():`.",
            )
        ) from error


def _is_of_legacy_keras(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "tf_keras"


def _name(strategy: Any) -> str:
    if strategy is None:
        return "no strategy"
    module = "" if private_api.is_ours(strategy) else type(strategy).__module__.partition(".")[0] + "'s "
    return module + type(strategy).__name__


def line_of_user() -> str:
    """Returns the file and line of the innermost caller outside of libraries (`tracebacks.is_of_library`).

    Returns:
        Such as `train.py:12`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if not tracebacks.is_of_library(frame):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
