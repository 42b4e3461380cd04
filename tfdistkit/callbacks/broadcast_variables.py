"""`BroadcastVariables`: broadcasts model and optimizer variables from one rank."""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.model_state import optimizers_of, value_of, variables_of
from tfdistkit.callbacks.process_group import Ranks, ranks_of, warn_once
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.validation import require_integer


class BroadcastVariables(keras.callbacks.Callback):
    """Broadcasts the variables of one rank to all, such as a checkpoint that only this rank has loaded.

    It broadcasts the model's variables (weights, layer state such as BatchNormalization's, seed generators) and
    the variables of its optimizers (slots, `iterations`, the learning rate, the scale of a LossScaleOptimizer).
    Afterwards the ranks hold equal values, bit for bit. It leaves out metrics, and variables with
    `synchronization="on_read"`, which hold a different part on each rank.

    The broadcast runs before the first step. If the first step creates variables (an optimizer that your own
    `train_step` builds), everything is broadcast again after the first batch. Under a tfdistkit strategy,
    variables are equal when they are created, so a job that starts fresh, or whose ranks all load the
    checkpoint, does not need this.

    Load on one rank into variables that exist on all: build the model, and for the optimizer's state
    `model.optimizer.build(model.trainable_variables)`, on every rank. Put this first in the list of callbacks.
    In a single process it does nothing, and logs that once.

    Args:
        root_rank: The rank whose variables are broadcast.

    Raises:
        OptionError: (a ValueError) if `root_rank` is not a rank of the job.
        UnsupportedError: (a RuntimeError) in training, on all ranks, if their variables differ in number or shape.

    Example:
        ```python
        if tfdistkit.is_chief():
            model.load_weights("last.weights.h5")
        model.fit(dataset, callbacks=[tfdistkit.callbacks.BroadcastVariables(root_rank=0)])
        ```
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank = require_integer("root_rank", root_rank, at_least=0)
        self._repeat_after_batch = False
        self._ranks: Ranks | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the variables that exist."""
        self._ranks = ranks_of(self.model)
        self._repeat_after_batch = False
        if self._ranks.is_single:
            warn_once("BroadcastVariables has nothing to do: there is one process.")
            return
        if self.root_rank >= self._ranks.size:
            raise OptionError(
                explain(
                    f"`root_rank` must be a rank of this job, from 0 to {self._ranks.size - 1}.",
                    received=f"root_rank={self.root_rank}",
                )
            )
        self._repeat_after_batch = not (self.model.built and all(one.built for one in optimizers_of(self.model)))
        _broadcast(self.model, self._ranks, self.root_rank)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts again if the first step created variables."""
        if self._repeat_after_batch and self._ranks is not None:
            self._repeat_after_batch = False
            _broadcast(self.model, self._ranks, self.root_rank)


def _broadcast(model: keras.Model, ranks: Ranks, root: int) -> None:
    variables = variables_of(model)
    values = [value_of(v) for v in variables]
    _require_equal_variables(ranks, values, root)
    sent_bytes = ranks.broadcast(b"".join(v.tobytes() for v in values) if ranks.rank == root else b"", root)
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
    of_ranks = ranks.gather(np.array([digest, len(values), sum(v.nbytes for v in values), root], np.int64))
    if (of_ranks == of_ranks[0]).all():
        return
    rows = [
        f"rank {rank}: {n} variables of {size} bytes, root_rank={r}"
        for rank, (_, n, size, r) in enumerate(of_ranks.tolist())
    ]
    raise UnsupportedError(
        explain(
            "All ranks must have the same variables, and pass the same `root_rank`.",
            received="; ".join(rows),
            do="Build the model, and model.optimizer.build(model.trainable_variables), on every rank before one rank "
            "loads a checkpoint.",
        )
    )
