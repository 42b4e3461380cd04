"""Lets subclasses of optimizers that override `apply` or `apply_gradients`, and clip there, see summed gradients.

The methods of Keras's classes are hooked once (`keras_patches`). An override runs before them, on the gradients of one
replica, so it is hooked when the first instance of its class is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync.gradients import gradient_scaling

_AROUND: dict[str, Callable[..., Any]] = {
    "apply": gradient_scaling.apply,
    "apply_gradients": gradient_scaling.apply_gradients,
}

# Hooked methods of classes.
_HOOKED: set[tuple[type, str]] = set()


def hook_own_methods(kind: type) -> None:
    """Hooks the methods of an optimizer's class and its bases, except those of Keras.

    Args:
        kind: The class.
    """
    for owner in kind.__mro__:
        if issubclass(owner, keras.optimizers.Optimizer) and not private_api.is_of_keras(owner):
            for name in _AROUND:
                _hook(owner, name)


def _hook(owner: type, name: str) -> None:
    if name not in owner.__dict__ or (owner, name) in _HOOKED:
        return
    _HOOKED.add((owner, name))
    original, around = owner.__dict__[name], _AROUND[name]

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, hooked)
