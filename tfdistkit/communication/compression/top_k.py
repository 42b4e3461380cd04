"""`TopK`: the largest numbers only."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.communication.compression.compression import flatten, unflatten
from tfdistkit.communication.compression.stateful import Feedback
from tfdistkit.communication.reducer import MakeState, Wire
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.validation import require_integer, require_positive

# The ratios of the warm-up: a quarter of all numbers, then a quarter of that, and so on.
_WARMUP = 0.25


class TopK(Feedback):
    """Sends the largest numbers of the gradients, and keeps the others for later steps.

    With `momentum`, `clip_norm` and `warmup_steps` it is Deep Gradient Compression (https://arxiv.org/abs/1712.01887):
    momentum is applied before numbers are chosen, so that what waits is not stale, and the optimizer has none.

    Args:
        ratio: The part of the numbers that is sent: 0.01 sends 1 %, as values and places.
        momentum: The momentum of what is sent, for an optimizer without one.
        clip_norm: Each replica's gradient is clipped to this norm, divided by the root of their number. Default: not.
        warmup_steps: Over so many steps the ratio goes from a quarter down to `ratio`, by quarters.
        min_size: Tensors of fewer numbers are not compressed.

    Raises:
        OptionError: (a ValueError) if an argument is out of range.
        UnsupportedError: (a RuntimeError) when the optimizer is built: if it has a momentum besides `momentum`.
    """

    def __init__(
        self,
        ratio: float = 0.01,
        *,
        momentum: float = 0.0,
        clip_norm: float | None = None,
        warmup_steps: int = 0,
        min_size: int = 0,
    ):
        super().__init__(min_size)
        self.ratio = require_positive("ratio", ratio)
        is_number = isinstance(momentum, (int, float, np.number))
        if ratio >= 1 or not is_number or not 0 <= momentum < 1:
            raise OptionError(
                explain(
                    "`ratio` must be between 0 and 1, and `momentum` at least 0 and below 1.",
                    received=f"ratio={ratio!r}, momentum={momentum!r}",
                )
            )
        self.momentum = float(momentum)
        self.clip_norm = None if clip_norm is None else require_positive("clip_norm", clip_norm)
        self.warmup_steps = require_integer("warmup_steps", warmup_steps, at_least=0)

    @property
    def replaces_optimizer(self) -> bool:  # type: ignore[override]
        return self.momentum > 0 or self.clip_norm is not None

    def check_optimizer(self, optimizer: Any) -> None:
        own = [name for name in ("momentum", "beta_1", "rho") if getattr(optimizer, name, 0.0)]
        if self.momentum and own:
            raise UnsupportedError(
                explain(
                    "TopK with `momentum` needs an optimizer without a momentum of its own, which would count twice.",
                    received=f"{type(optimizer).__name__} with {own[0]}={getattr(optimizer, own[0])!r}",
                    do=f"Use keras.optimizers.SGD(...), or TopK({self.ratio:g}) without `momentum`.",
                )
            )

    def build_state(self, variable: Any, number: int, make_state: MakeState) -> dict[str, Any]:
        made = super().build_state(variable, number, make_state)
        if self.momentum:
            made["velocity"] = make_state(variable, "compression_velocity", dtype="float32", of_replica=True)
        return made

    def sum_with_rests(
        self, gradients: list[tf.Tensor], state: list[Any], step: tf.Tensor, wire: Wire
    ) -> tuple[list[tf.Tensor], list[tuple[Any, tf.Tensor]]]:
        rests = [one["rest"] for one in state]
        flat = flatten(gradients)
        if self.clip_norm is not None:
            flat = tf.clip_by_norm(flat, self.clip_norm / wire.replicas**0.5)
        velocities = [one["velocity"] for one in state] if self.momentum else []
        if velocities:
            flat += self.momentum * flatten(velocities)
        wanted = flat + flatten(rests)

        summed, is_sent = self._sum_largest(wanted, step, wire)
        changes = list(zip(rests, unflatten(tf.where(is_sent, 0.0, wanted), rests)))
        if velocities:
            changes += zip(velocities, unflatten(tf.where(is_sent, 0.0, flat), velocities))
        return unflatten(summed, gradients), changes

    def _sum_largest(self, wanted: tf.Tensor, step: tf.Tensor, wire: Wire) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sums of what the replicas send, and which numbers this one sent."""
        ratios = self._ratios()
        if len(ratios) == 1:
            return _sum_largest(wanted, ratios[0], wire)
        stage = tf.minimum(step * (len(ratios) - 1) // self.warmup_steps, len(ratios) - 1)
        # Each ratio has a collective of its own: its length must be known while tracing.
        branches = {i: lambda ratio=ratio: _sum_largest(wanted, ratio, wire) for i, ratio in enumerate(ratios)}
        return tf.switch_case(tf.cast(stage, tf.int32), branches)

    def _ratios(self) -> list[float]:
        ratios, ratio = [], _WARMUP
        while self.warmup_steps and ratio > self.ratio:
            ratios.append(ratio)
            ratio *= _WARMUP
        return [*ratios, self.ratio]


def _sum_largest(wanted: tf.Tensor, ratio: float, wire: Wire) -> tuple[tf.Tensor, tf.Tensor]:
    size: int = wanted.shape[0]
    number = max(1, int(size * ratio))
    # A number that is not finite must reach all replicas.
    sizes = tf.where(tf.math.is_finite(wanted), tf.abs(wanted), tf.fill([size], float("inf")))
    places = tf.math.top_k(sizes, number, sorted=False).indices
    sent = tf.concat([tf.bitcast(tf.gather(wanted, places), tf.int32), places], 0)
    everyone = wire.gather(sent)
    # One replica after the other: sums in any order would differ between GPUs.
    summed = tf.zeros([size])
    for replica in range(wire.replicas):
        values = tf.bitcast(everyone[replica, :number], tf.float32)
        summed += tf.scatter_nd(everyone[replica, number:, None], values, [size])
    is_sent = tf.scatter_nd(places[:, None], tf.ones([number], tf.int32), [size]) > 0
    return summed, is_sent
