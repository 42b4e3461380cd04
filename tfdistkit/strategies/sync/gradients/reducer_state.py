"""The state of a reducer: variables that belong to an optimizer, which saves them with its own."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.communication.reducer import Reducer, cast, own_reducer, times
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api, table_parts

_LOCAL = threading.local()

# By optimizer: the state of each of its variables, by `id`.
_STATES: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
# By optimizer: the variables of which each replica has a value of its own.
_OF_REPLICAS: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
# By optimizer: the reducer that made its state.
_REDUCERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def build_optimizer(original: Any, optimizer: Any, variables: Any) -> None:
    """Hook of the `build` of Keras's optimizers: lets the reducer of their gradients add its state."""
    if _is_left(optimizer):
        return
    variables = list(variables)
    with scope_of(variables):
        _build(original, optimizer, variables)


def _build(original: Any, optimizer: Any, variables: list[Any]) -> None:
    strategy: Any = tf.distribute.get_strategy()
    is_ours = private_api.is_ours(strategy) and not hasattr(optimizer, "inner_optimizer")
    if is_ours:
        # Before it makes variables, of which other optimizers have others.
        strategy.check_optimizer(optimizer)
        strategy.check_choices(reducer_of(optimizer), variables)
    original(optimizer, variables)
    if not is_ours:
        return
    own = own_reducer(optimizer)
    if own is not None:
        strategy.check_own_reducer(own)
    reducer = reducer_of(optimizer)
    reducer.check_optimizer(optimizer)
    if not reducer.has_state:
        return
    of_replicas: list[Any] = []

    def make_state(
        variable: Any,
        name: str,
        shape: Any = None,
        dtype: Any = None,
        initializer: Any = "zeros",
        of_replica: bool = False,
        saved: bool = True,
    ) -> Any:
        shape, dtype = variable.shape if shape is None else shape, dtype or variable.dtype
        name = f"{variable.path.replace('/', '_')}_{name}"  # As Keras names slots.
        made = optimizer.add_variable(shape, initializer=initializer, dtype=dtype, name=name)
        if of_replica:
            of_replicas.append(made)
        if of_replica or not saved:
            table_parts.leave_out(optimizer, made)
        return made

    states = reducer.build(variables, make_state) or [None] * len(variables)
    if len(states) != len(variables):
        raise UnsupportedError(
            explain(
                f"{type(reducer).__name__}.build must return the state of each variable, in their order.",
                received=f"{len(states)} states",
                expected=f"{len(variables)} states, or None",
            )
        )
    _STATES[optimizer] = {id(variable): state for variable, state in zip(variables, states)}
    # Users may hand over the TensorFlow variables.
    _STATES[optimizer].update({id(private_api.raw_variable(v)): state for v, state in zip(variables, states)})
    _OF_REPLICAS[optimizer], _REDUCERS[optimizer] = of_replicas, strategy.reducer


def slot(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of `add_variable_from_reference`: makes a slot in the scope of its variable's strategy."""
    with scope_of([args[0] if args else kwargs.get("reference_variable")]):
        return table_parts.slot(original, optimizer, *args, **kwargs)


def scope_of(variables: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope of the strategy of ours that made variables; an empty context in a scope, or for none of ours.

    `compile` may be called outside of the scope: so may `optimizer.build`.

    Args:
        variables: Keras or TensorFlow variables.
    """
    if tf.distribute.has_strategy():
        return contextlib.nullcontext()
    found = (private_api.owner_of(one) for one in variables)
    owner = next((one for one in found if private_api.is_ours(one)), None)
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if owner is None else owner.scope()
    return scope


def reducer_of(optimizer: Any) -> Reducer:
    """Returns the reducer for the gradients of an optimizer: its own, or that of the strategy.

    Args:
        optimizer: The optimizer; None if unknown.
    """
    strategy: Any = tf.distribute.get_strategy()
    found: Reducer = own_reducer(optimizer) or strategy.reducer
    return found


@contextlib.contextmanager
def building(model: Any) -> Iterator[None]:
    """Leaves the optimizer of a model to its first step, while its body builds the model, if layers remain unbuilt.

    A custom `train_step` may call layers that `call` does not (the projection head of a contrastive model). They have
    no variables before the first step, and an optimizer cannot add variables later.

    Args:
        model: The model.
    """
    before = getattr(_LOCAL, "model", None)
    _LOCAL.model = None if type(model).train_step is keras.Model.train_step else model
    try:
        yield
    finally:
        _LOCAL.model = before


def _is_left(optimizer: Any) -> bool:
    model = getattr(_LOCAL, "model", None)
    is_own = model is not None and model.optimizer is optimizer
    return is_own and not all(layer.built for layer in private_api.layers_of(model))


def require_built(optimizer: Any, variables: list[Any] | None) -> None:
    """Builds an optimizer in its first step, as Keras does a little later, if the reducer has state.

    Args:
        optimizer: The optimizer.
        variables: The variables that it updates; None for an optimizer that is built.
    """
    if reducer_of(optimizer).has_state and variables is not None and not optimizer.built:
        optimizer.build(variables)
        optimizer.built = True


def variables_of_replicas(optimizer: Any) -> list[tuple[Any, str]]:
    """Returns the variables of an optimizer of which each replica has a value of its own.

    Args:
        optimizer: A Keras optimizer.

    Returns:
        Each with what another number of replicas resumes with: "sum", or "mean" (slots of `LocalSGD(slots="keep")`).
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    state = [(variable, "sum") for variable in _OF_REPLICAS.get(optimizer, [])]
    reducer = _REDUCERS.get(optimizer)
    return state + [(variable, "mean") for variable in (reducer.own_slots(optimizer) if reducer is not None else [])]


def state_of(reducer: Any, optimizer: Any, variables: list[Any]) -> list[Any]:
    """Returns the state of variables.

    Args:
        reducer: The reducer of their gradients.
        optimizer: The optimizer that updates them; None for none.
        variables: The variables.

    Raises:
        UnsupportedError: if the reducer has state and the optimizer was not built in the scope of the strategy.
    """
    if not reducer.has_state:
        return [None] * len(variables)
    states = _STATES.get(getattr(optimizer, "inner_optimizer", optimizer)) if optimizer is not None else None
    if states is None:
        received = f"{type(optimizer).__name__} without it" if optimizer is not None else "tfdistkit.global_gradients"
        raise UnsupportedError(
            explain(
                f"{type(reducer).__name__} keeps state, which belongs to an optimizer.",
                received=received,
                expected="an optimizer that is built in `strategy.scope()`: by `fit`, or by "
                "`optimizer.build(model.trainable_variables)`",
                do="Let `optimizer.apply` sum the gradients, and build the optimizer in the scope.",
            )
        )
    return [states.get(id(variable)) for variable in variables]


def reduce_unscaled(
    gradients: list[Any], scale: tf.Tensor, state: list[Any], reduce: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Reduces the gradients of a `LossScaleOptimizer` by a reducer with state, which must not depend on their scale.

    The optimizer skips a step in which a gradient is not finite, and such a step leaves the state as it was.

    Args:
        gradients: This replica's parts, times the scale.
        scale: The scale, a scalar tensor.
        state: The state of the reducer: variables, also in lists and dicts.
        reduce: Returns the reduced gradients, the same on all replicas, and changes the state.

    Returns:
        The reduced gradients, times the scale.
    """
    kept = list({id(one): one for one in tf.nest.flatten(state) if one is not None}.values())
    before = [tf.identity(tf.convert_to_tensor(one)) for one in kept]
    # In float32: what the scale protects would be lost in float16.
    exact = [cast(g, tf.float32) if g.dtype == tf.float16 else g for g in gradients]
    scaled = [times(g, scale) for g in reduce([times(g, 1.0 / scale) for g in exact])]
    reduced = [cast(g, given.dtype) for g, given in zip(scaled, gradients)]
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in reduced]
    is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
    for variable, old in zip(kept, before):
        variable.assign(tf.where(is_finite, tf.convert_to_tensor(variable), old))
    return reduced


def no_loss_scale(reducer: Any) -> UnsupportedError:
    """Returns the error for a `LossScaleOptimizer` whose replicas would skip steps alone.

    Args:
        reducer: The reducer of the strategy.
    """
    return UnsupportedError(
        explain(
            f"{type(reducer).__name__} cannot be used with a LossScaleOptimizer: a worker would skip steps alone.",
            received="a LossScaleOptimizer, as the dtype policy mixed_float16 makes one",
            do='Use keras.mixed_precision.set_dtype_policy("mixed_bfloat16"), which needs no loss scale.',
        )
    )
