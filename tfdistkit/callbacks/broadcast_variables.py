"""`BroadcastVariables`: all ranks start from what one rank has."""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.model_state import optimizers_of, value_of, variables_of
from tfdistkit.callbacks.process_group import Ranks, ranks_of, tell_once
from tfdistkit.errors import OptionError, UnsupportedError, explain


class BroadcastVariables(keras.callbacks.Callback):
    """Gives all ranks the state of one: for a checkpoint that only one rank has loaded.

    Sent are the model's variables (weights, layer state such as BatchNormalization's, seed generators) and
    those of its optimizers (slots, `iterations`, the learning rate, the scale of a LossScaleOptimizer). The
    ranks hold equal values afterwards, bit for bit. Not sent: metrics, and variables with
    `synchronization="on_read"`, which live in parts on all ranks.

    It happens before the first step. What does not exist by then, because only the first step makes it (an
    optimizer that a `train_step` of your own builds), follows with everything else after the first batch.
    Under a strategy of tfdistkit the variables are made equal when they are created, so a job that starts
    fresh, or whose ranks all load the checkpoint, does not need this.

    Load on the one rank into variables that exist on all: build the model, and for the optimizer's state
    `model.optimizer.build(model.trainable_variables)`, on every rank. Put this first in the list of callbacks.
    In a single process it does nothing, and says so in the log.

    Args:
        root_rank: The rank that has the state.

    Raises:
        OptionError: (a ValueError) if `root_rank` is no rank of the job.
        UnsupportedError: (a RuntimeError) in training, on all ranks, if they hold different variables.

    Example:
        ```python
        if tfdistkit.is_chief():
            model.load_weights("last.weights.h5")
        model.fit(dataset, callbacks=[tfdistkit.callbacks.BroadcastVariables(root_rank=0)])
        ```
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        if isinstance(root_rank, bool) or not isinstance(root_rank, int) or root_rank < 0:
            raise OptionError(
                explain("`root_rank` is no rank.", received=f"root_rank={root_rank!r}", expected="a number from 0")
            )
        self.root_rank = root_rank
        self._again = False
        self._ranks: Ranks | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sends what there is."""
        self._ranks = ranks_of(self.model)
        self._again = False
        if self._ranks.alone:
            tell_once("BroadcastVariables has nothing to do: this process trains alone.")
            return
        if self.root_rank >= self._ranks.size:
            raise OptionError(
                explain(
                    "`root_rank` is no rank of this job.",
                    received=f"root_rank={self.root_rank}",
                    expected=f"0 to {self._ranks.size - 1}",
                )
            )
        self._again = not (self.model.built and all(one.built for one in optimizers_of(self.model)))
        _send(self.model, self._ranks, self.root_rank)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sends everything once more if the first step made some of it."""
        if self._again and self._ranks is not None:
            self._again = False
            _send(self.model, self._ranks, self.root_rank)


def _send(model: keras.Model, ranks: Ranks, root: int) -> None:
    variables = variables_of(model)
    values = [value_of(v) for v in variables]
    _require_equal_variables(ranks, values, root)
    sent_bytes = ranks.share(b"".join(v.tobytes() for v in values) if ranks.rank == root else b"", root)
    packed: Any = np.frombuffer(sent_bytes, np.uint8)
    if ranks.rank == root:
        return
    start = 0
    for variable, value in zip(variables, values):
        sent = packed[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
        variable.assign(tf.constant(sent, dtype=variable.value.dtype))
        start += value.nbytes


def _require_equal_variables(ranks: Ranks, values: list[np.ndarray], root: int) -> None:
    shapes = repr([(v.dtype.name, v.shape) for v in values])
    digest = int.from_bytes(hashlib.sha256(shapes.encode()).digest()[:7], "big")
    everyone = ranks.gather(np.array([digest, len(values), sum(v.nbytes for v in values), root], np.int64))
    if (everyone == everyone[0]).all():
        return
    rows = [
        f"rank {rank}: {n} variables of {size} bytes, root_rank={r}"
        for rank, (_, n, size, r) in enumerate(everyone.tolist())
    ]
    raise UnsupportedError(
        explain(
            "The ranks cannot take over the variables of one: they do not hold the same.",
            received="; ".join(rows),
            expected="the same model and optimizer, built alike, and the same `root_rank` on every rank",
            do="Build the model, and model.optimizer.build(model.trainable_variables), on every rank before one loads.",
        )
    )
