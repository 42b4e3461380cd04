"""`ConsistencyCheck`: compares the weights of all replicas."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import keras
import numpy as np

from tfdistkit.callbacks.backup.model_state import variables_of
from tfdistkit.callbacks.frequency import frequency_of
from tfdistkit.callbacks.process_group import Ranks, ranks_of, warn_once
from tfdistkit.errors import DivergenceError, OptionError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.validation import require_choice

_LOG = logging.getLogger(__name__)


class ConsistencyCheck(keras.callbacks.Callback):
    """Compares the weights of all replicas, and names the first variable that differs.

    In synchronous training all replicas hold the same weights, bit for bit, after every step. If they diverge - a
    callback set weights on one rank, or a memory bit flipped - training continues with wrong gradients. This
    compares a hash of weights, layer state, seeds and optimizer variables. It reads them once (about 1 GB/s) and
    runs one collective of eight bytes per replica; only if the hashes differ, further collectives find the variable
    and the difference. Between two averages of an `algorithm` (`LocalSGD`, `DiLoCo`) it does not compare.

    Every rank must have it; its position in the list does not matter. With a single replica it does nothing, and
    logs that once. Metrics and variables with `synchronization="on_read"` are not compared.

    Args:
        every: A number of steps, `"epoch"`, or a text such as `"500 steps"`, `"2 epochs"`.
        action: `"raise"`, or `"warn"` to log a warning and continue.

    Raises:
        OptionError: (a ValueError) if an argument is invalid.
        DivergenceError: (a RuntimeError) in training, on all ranks, if replicas differ.

    Example:
        ```python
        model.fit(dataset, callbacks=[tfdistkit.callbacks.ConsistencyCheck(every=1000)])
        ```
    """

    def __init__(self, every: int | str = "epoch", action: str = "raise"):
        super().__init__()
        self._frequency = frequency_of("every", every)
        if self._frequency.unit == "seconds":
            raise OptionError(
                explain(
                    "`every` must be in steps or epochs, which all ranks reach together.",
                    received=f"every={every!r}",
                    do='Pass a number of steps, or a text such as "2 epochs".',
                )
            )
        require_choice("action", action, ("raise", "warn"))
        self.every, self.action = every, action
        self._ranks: Ranks | None = None
        self._steps = self._checked_at = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the process group."""
        self._ranks = ranks_of(self.model)
        self._steps = self._checked_at = 0
        strategy: Any = self.model.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            self._ranks = None
            warn_once("ConsistencyCheck has nothing to do: there is one replica.")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares, if `every` counts steps."""
        self._steps += int(self.model.steps_per_execution)
        if self._frequency.unit == "steps" and self._steps - self._checked_at >= self._frequency.amount:
            self._checked_at = self._steps
            self._check(f"after step {self._steps} of this run")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares, if `every` counts epochs."""
        if self._frequency.unit == "epochs" and (epoch + 1) % self._frequency.amount == 0:
            self._check(f"after epoch {epoch + 1}")

    def _check(self, when: str) -> None:
        strategy: Any = private_api.strategy_of(self.model)
        # Between two averages of an algorithm (`LocalSGD`) replicas have other weights on purpose.
        if self._ranks is None or (private_api.is_ours(strategy) and not strategy.has_equal_weights()):
            return
        difference = find_difference(self.model, self._ranks)
        if difference is None:
            return
        message = explain(
            "All replicas must hold the same weights, bit for bit.",
            received=f"{difference}, {when}",
            do="Look for code that only some ranks run: a callback that sets weights or the learning rate on one of "
            "them, a loss or a branch that depends on the rank. BroadcastVariables makes the weights equal when "
            "training begins.",
        )
        if self.action == "raise":
            raise DivergenceError(message)
        if self._ranks.rank == 0:
            _LOG.warning(message)


def find_difference(model: keras.Model, ranks: Ranks) -> str | None:
    """Describes the first variable that differs between the replicas.

    Args:
        model: The model.
        ranks: The ranks that train it; all of them call this.

    Returns:
        A text, the same on every rank; None if all variables are equal.
    """
    strategy: Any = model.distribute_strategy
    variables = variables_of(model)
    here = max((len(_copies(strategy, v)) for v in variables), default=1)
    digests = np.array([[_digest(copy) for copy in _all(strategy, v, here)] for v in variables], np.int64)
    whole = np.array([_digest(np.ascontiguousarray(digests[:, i])) for i in range(here)], np.int64)
    of_replicas = ranks.gather(whole).reshape(-1)
    if (of_replicas == of_replicas[0]).all():
        return None
    each = ranks.gather(np.ascontiguousarray(digests.T).reshape(-1)).reshape(ranks.size * here, -1)
    index = int((each != each[0]).any(0).argmax())
    variable = variables[index]
    mine = _all(strategy, variable, here)
    shared = ranks.broadcast(mine[0].tobytes() if ranks.rank == 0 else b"", 0)
    expected = np.frombuffer(shared, mine[0].dtype).reshape(mine[0].shape)
    found = np.concatenate([_compare(one, expected) for one in mine])
    return _describe(variable, ranks.gather(found).reshape(-1, 2), here)


def _describe(variable: Any, found: np.ndarray, here: int) -> str:
    replica = int((found[:, 1] > 0).argmax())
    kind = "rank" if here == 1 else "replica"
    size = int(np.prod(variable.shape))
    name = getattr(variable, "path", variable.name)
    return (
        f"`{name}` is the first variable that differs: {kind} {replica} from {kind} 0 by up to "
        f"{found[replica, 0]:.6g}, in {int(found[replica, 1])} of {size} numbers"
    )


def _copies(strategy: Any, variable: Any) -> list[Any]:
    return list(strategy.experimental_local_results(variable.value))


def _all(strategy: Any, variable: Any, here: int) -> list[np.ndarray]:
    """Returns the variable's value on each replica of this process; a shared variable is repeated."""
    values = [np.asarray(copy.numpy()) for copy in _copies(strategy, variable)]
    return values if len(values) == here else values[:1] * here


def _digest(value: np.ndarray) -> int:
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return int.from_bytes(hashlib.blake2b(data.data, digest_size=8).digest(), "big", signed=True)


def _compare(value: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns the largest difference, and the count of numbers whose bits differ."""
    differ = (_bits(value) != _bits(expected)).any(1)
    if not differ.any():
        return np.zeros(2)
    with np.errstate(invalid="ignore"):
        by = np.abs(value.reshape(-1)[differ].astype(np.float64) - expected.reshape(-1)[differ].astype(np.float64))
    return np.array([np.nan if np.isnan(by).all() else np.nanmax(by), differ.sum()], np.float64)


def _bits(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).reshape(value.size, -1)
