"""The base of compressions that keep, for the next step, what they did not send (error feedback)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.compression.compression import Compression
from tfdistkit.communication.reducer import MakeState, Wire


class Feedback(Compression):
    """Adds what was not sent to the next gradient; counts its steps.

    A subclass overrides `sum_with_rests`, and `build_state` where it keeps more.
    """

    def build(self, variables: list[Any], make_state: MakeState) -> list[Any]:
        taken = [variable for variable in variables if self.takes(variable)]
        step = make_state(taken[0], "compression_step", shape=(), dtype="int64", saved=False) if taken else None
        return [{"step": step, **self.build_state(v, i, make_state)} if self.takes(v) else None
                for i, v in enumerate(variables)]  # fmt: skip

    def build_state(self, variable: Any, number: int, make_state: MakeState) -> dict[str, Any]:
        """Makes the state of a variable.

        Args:
            variable: The variable.
            number: Its place among those of the optimizer.
            make_state: As for `build`.
        """
        return {"rest": make_state(variable, "compression_rest", dtype="float32", of_replica=True)}

    def sum_compressed(self, gradients: list[tf.Tensor], state: list[Any], wire: Wire) -> list[tf.Tensor]:
        step = tf.convert_to_tensor(state[0]["step"])
        sums, changes = self.sum_with_rests(gradients, state, step, wire)
        for variable, new in changes:
            variable.assign(tf.reshape(new, variable.shape))
        state[0]["step"].assign(step + 1)
        return sums

    def sum_with_rests(
        self, gradients: list[tf.Tensor], state: list[Any], step: tf.Tensor, wire: Wire
    ) -> tuple[list[tf.Tensor], list[tuple[Any, tf.Tensor]]]:
        """Returns the sums, and the state to assign with its new values.

        Args:
            gradients: This replica's parts, of static shapes.
            state: What `build_state` returned for the variable of each.
            step: The steps until now, a scalar int64 tensor, the same on all replicas.
            wire: The collectives.
        """
        raise NotImplementedError
