"""`OneBitAdam` and `QAdam`: Adam whose variance is frozen after its first steps, and whose momentum is compressed.

The sum of momenta of workers is the momentum of their summed gradients, because both are linear. The variance, which is
not, is frozen once it has settled. https://arxiv.org/abs/2102.02888
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdistkit.communication.compression.byte_grad import ByteGrad
from tfdistkit.communication.compression.momentum import MomentumReducer, limited
from tfdistkit.communication.compression.scatter_gather import Quantizer
from tfdistkit.communication.compression.sign import Sign
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_integer

_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


class FrozenAdam(keras.optimizers.Optimizer):
    """Adam whose variance is frozen after `exact_steps` updates; the base of `OneBitAdam` and `QAdam`.

    Its files are those of `keras.optimizers.Adam`.

    Args:
        exact_steps: Updates before the variance is frozen.
        quantizer: How its momentum travels from then on, where a strategy of several workers trains.
        learning_rate: As in `keras.optimizers.Adam`, and so are `beta_1`, `beta_2`, `epsilon`.
        beta_1: The decay of the momentum.
        beta_2: The decay of the variance.
        epsilon: Added to its root.
        kwargs: Of every Keras optimizer, but for clipping.

    Attributes:
        reducer: What reduces the gradients of the replicas under a strategy of tfdistkit.

    Raises:
        OptionError: if an argument is out of range.
    """

    def __init__(
        self,
        exact_steps: int,
        quantizer: Quantizer,
        learning_rate: Any,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        **kwargs: Any,
    ):
        clipping = [f"{name}={kwargs[name]!r}" for name in _CLIPPING if kwargs.get(name) is not None]
        if clipping:
            raise OptionError(
                explain(
                    f"{type(self).__name__} cannot clip gradients: after the first steps no worker has their sum.",
                    received=", ".join(clipping),
                    do="Remove it. Single numbers never move further than Adam moves them.",
                )
            )
        if not (0.0 <= beta_1 < 1.0 and 0.0 <= beta_2 < 1.0 and epsilon > 0):
            raise OptionError(
                explain(
                    "`beta_1` and `beta_2` must be at least 0 and below 1, and `epsilon` above 0.",
                    received=f"beta_1={beta_1!r}, beta_2={beta_2!r}, epsilon={epsilon!r}",
                )
            )
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.exact_steps = exact_steps
        options = f"exact_steps={exact_steps}, beta_1={beta_1:g}, beta_2={beta_2:g}, epsilon={epsilon:g}"
        self.reducer = MomentumReducer(self, quantizer, f"{type(self).__name__}({options})")

    def build(self, variables: list[Any]) -> None:
        """Makes the momentum and the variance of each variable, in the order of `keras.optimizers.Adam`."""
        if self.built:
            return
        super().build(variables)
        self.momentums, self.velocities = self.add_optimizer_variables(variables, ["momentum", "velocity"])

    def is_exact(self) -> tf.Tensor:
        """Returns whether this step is one of the first, in which the variance goes on."""
        return tf.convert_to_tensor(self.iterations) < self.exact_steps

    def momentum_of(self, variable: Any) -> Any:
        """Returns the momentum of a variable; None for a variable that is overwritten by its gradient."""
        return self.momentums[self._get_variable_index(variable)]

    def unit_of(self, variable: Any) -> tf.Tensor:
        """Returns the momentum that moves each number of a variable by the learning rate."""
        velocity = tf.convert_to_tensor(self.velocities[self._get_variable_index(variable)])
        exact = tf.cast(velocity, _dtype_of_weights(velocity.dtype))
        return (tf.sqrt(exact) + self.epsilon) / self._root_of_weights(exact.dtype)

    def reach(self) -> float:
        """Returns by how many learning rates a number moves at most in a step: as far as Adam moves it.

        The variance of Adam grows with a gradient, and bounds what that does. A frozen one does not: a feature that
        was never there in the first steps has a variance of zero.
        """
        return max(1.0, (1.0 - self.beta_1) / (1.0 - self.beta_2) ** 0.5)

    def _root_of_weights(self, dtype: Any) -> tf.Tensor:
        """Returns the root of what the gradients in the variance weigh together."""
        steps = tf.minimum(tf.cast(self.iterations, tf.int64) + 1, self.exact_steps)
        return tf.sqrt(1.0 - tf.pow(tf.cast(self.beta_2, dtype), tf.cast(steps, dtype)))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable by the gradient of the global batch.

        Args:
            gradient: Dense, or IndexedSlices.
            variable: The variable.
            learning_rate: The learning rate.
        """
        ops, dtype = keras.ops, variable.dtype
        gradient, rate = ops.cast(gradient, dtype), ops.cast(learning_rate, dtype)
        index = self._get_variable_index(variable)
        momentum, velocity = self.momentums[index], self.velocities[index]
        is_exact, beta_2 = self.is_exact(), 1.0 - self.beta_2

        moved = ops.convert_to_tensor(momentum) + ops.multiply(ops.subtract(gradient, momentum), 1.0 - self.beta_1)
        limit = tf.cast(self.reach() * self.unit_of(variable), dtype)
        self.assign(momentum, tf.where(is_exact, moved, limited(moved, limit)))

        change = ops.convert_to_tensor(ops.multiply(ops.subtract(ops.square(gradient), velocity), beta_2))
        self.assign_add(velocity, tf.where(is_exact, change, tf.zeros_like(change)))

        exact = _dtype_of_weights(tf.as_dtype(dtype))
        weight = 1.0 - tf.pow(tf.cast(self.beta_1, exact), tf.cast(self.iterations + 1, exact))
        alpha = rate * tf.cast(self._root_of_weights(exact) / weight, dtype)
        root = ops.add(ops.sqrt(velocity), self.epsilon)
        self.assign_sub(variable, ops.divide(ops.multiply(momentum, alpha), root))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for files of models."""
        own = {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}
        return {**super().get_config(), **own}


def _dtype_of_weights(dtype: tf.DType) -> tf.DType:
    # In bfloat16, 0.999 is 1.
    return tf.float64 if dtype == tf.float64 else tf.float32


@keras.saving.register_keras_serializable("tfdistkit")
class OneBitAdam(FrozenAdam):
    """Adam that sends one bit for each weight after its first steps, a thirtieth of the bytes, with error feedback.

    For `freeze_after` updates it is `keras.optimizers.Adam`: workers sum their gradients exactly. Then the variance is
    frozen. From there on each worker adds its own gradient to the momentum, and what travels is the sign of each
    number, and a size for 1024 of them, both to the worker that sums them and back.
    (https://arxiv.org/abs/2102.02888)

    `freeze_after` is right once the variance changes little: a fifth of all steps, and at least a few hundred. In one
    process it is Adam with a variance that is frozen.

    Args:
        learning_rate: As in `keras.optimizers.Adam`.
        freeze_after: Updates until the variance is frozen; at least 1.
        beta_1: As in `keras.optimizers.Adam`.
        beta_2: As in `keras.optimizers.Adam`.
        epsilon: As in `keras.optimizers.Adam`.
        kwargs: Of every Keras optimizer: `weight_decay`, `use_ema`, `gradient_accumulation_steps`, `name`, ...

    Raises:
        OptionError: (a ValueError) if an argument is out of range, or one that clips gradients is given.
        UnsupportedError: (a RuntimeError) when it is built: under a strategy whose replicas do not send each other
            gradients, or one with a `compression`, an `algorithm` or a `reducer`.

    Example:
        ```python
        model.compile(tfdistkit.compression.OneBitAdam(1e-3, freeze_after=1000), loss="mse")
        ```
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        freeze_after: int,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **kwargs: Any,
    ):
        steps = require_integer("freeze_after", freeze_after)
        super().__init__(steps, Sign(warmup_steps=1), learning_rate, beta_1, beta_2, epsilon, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for files of models."""
        return {**super().get_config(), "freeze_after": self.exact_steps}


@keras.saving.register_keras_serializable("tfdistkit")
class QAdam(FrozenAdam):
    """Adam that sends a byte for each weight after its first steps, a quarter of the bytes, with error feedback.

    As `OneBitAdam`, with the bytes of `ByteGrad` in place of signs: for a short warm-up.
    (https://tutorials.baguasys.com/algorithms/q-adam)

    Args:
        learning_rate: As in `keras.optimizers.Adam`.
        warmup_steps: Updates until the variance is frozen; at least 1.
        beta_1: As in `keras.optimizers.Adam`.
        beta_2: As in `keras.optimizers.Adam`.
        epsilon: As in `keras.optimizers.Adam`.
        kwargs: As in `OneBitAdam`.

    Raises:
        OptionError: (a ValueError) as `OneBitAdam`.
        UnsupportedError: (a RuntimeError) as `OneBitAdam`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        warmup_steps: int,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **kwargs: Any,
    ):
        steps = require_integer("warmup_steps", warmup_steps)
        super().__init__(steps, ByteGrad(), learning_rate, beta_1, beta_2, epsilon, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for files of models."""
        return {**super().get_config(), "warmup_steps": self.exact_steps}
