"""Makes a tf.function that a Keras step calls a part of the step's own graph, so that what it computes can be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import step as steps

# What a tf.function returns as tensors.
_RESULTS = (np.ndarray, bool, int, float, str, tf.Variable)


def call(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of the call of a tf.function: in a Keras step, runs its Python code, converted by AutoGraph as it would be.

    Args:
        original: TensorFlow's own method.
        function: The tf.function.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        Its results, as tensors.
    """
    step = steps.current()
    if step is None or not step.in_keras_step or step.is_eager or not _is_inlined(function):
        return original(function, *args, **kwargs)
    inner = private_api.converted_python_function(function)
    args, kwargs = tf.nest.map_structure(lambda v: _as_tensor(v, np.ndarray), (args, kwargs))
    return tf.nest.map_structure(
        lambda v: _as_tensor(v, (np.ndarray, bool, int, float, str, tf.Variable)), inner(*args, **kwargs)
    )


def _as_tensor(value: Any, kinds: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, kinds) else value


def _is_inlined(function: Any) -> bool:
    """Returns whether a tf.function is of the user, who did not say how to compile it, or for which tensors."""
    is_plain = function.input_signature is None and not private_api.is_compiled(function)
    home = str(getattr(function.python_function, "__module__", "")).partition(".")[0]
    return is_plain and home not in ("tensorflow", "keras")
