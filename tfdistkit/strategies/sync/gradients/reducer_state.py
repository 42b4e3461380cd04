"""The state of a reducer: variables that belong to an optimizer, which saves them with its own."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api

# By optimizer: the state of each of its variables, by `id`.
_STATES: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


def build_optimizer(original: Any, optimizer: Any, variables: Any) -> None:
    """Hook of the `build` of Keras's optimizers: lets the reducer of the strategy add its state."""
    variables = list(variables)
    original(optimizer, variables)
    strategy: Any = tf.distribute.get_strategy()
    if not private_api.is_ours(strategy) or not strategy.reducer.has_state or hasattr(optimizer, "inner_optimizer"):
        return

    def make_state(variable: Any, name: str) -> Any:
        return optimizer.add_variable_from_reference(variable, name=name)

    states = strategy.reducer.build(variables, make_state) or [None] * len(variables)
    if len(states) != len(variables):
        raise UnsupportedError(
            explain(
                f"{type(strategy.reducer).__name__}.build must return the state of each variable, in their order.",
                received=f"{len(states)} states",
                expected=f"{len(variables)} states, or None",
            )
        )
    _STATES[optimizer] = {id(variable): state for variable, state in zip(variables, states)}


def state_of(reducer: Any, optimizer: Any, variables: list[Any]) -> list[Any]:
    """Returns the state of variables.

    Args:
        reducer: The reducer of the strategy.
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
