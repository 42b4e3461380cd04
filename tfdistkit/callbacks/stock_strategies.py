"""Refuses models under TensorFlow's own strategies, and names the replacement."""

from __future__ import annotations

from typing import Any

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api

# Maps TensorFlow's class to its public name and to tfdistkit's strategy of the same kind.
_KINDS = {
    "MirroredStrategy": ("MirroredStrategy", "mirrored"),
    "OneDeviceStrategy": ("OneDeviceStrategy", "one_device"),
    "CollectiveAllReduceStrategy": ("MultiWorkerMirroredStrategy", "multiworker"),
    "MultiWorkerMirroredStrategy": ("MultiWorkerMirroredStrategy", "multiworker"),
    "CentralStorageStrategy": ("experimental.CentralStorageStrategy", "central_storage"),
    "CentralStorageStrategyV1": ("experimental.CentralStorageStrategy", "central_storage"),
    "ParameterServerStrategyV2": ("ParameterServerStrategy", "parameter_server"),
}


def require_ours(strategy: Any, callback: str, why: str, instead: str) -> None:
    """Raises an error if a model's strategy is not from tfdistkit.

    Args:
        strategy: The strategy of the model, or None.
        callback: The callback that the user asked for.
        why: The reason, as a clause.
        instead: An alternative under TensorFlow's own strategies, as a clause.

    Raises:
        UnsupportedError: if it is a TensorFlow strategy.
    """
    if strategy is None or private_api.is_ours(strategy):
        return
    kind = type(strategy)
    name, ours = _KINDS.get(kind.__name__, (f"{kind.__name__} of {kind.__module__}", "auto"))
    shown = f"tf.distribute.{name}" if kind.__name__ in _KINDS else name
    raise UnsupportedError(
        explain(
            f"{callback} does not work under a strategy that tfdistkit did not make: {why}.",
            received=f"a model in the scope of {shown}(...)",
            expected=f'a model in the scope of tfdistkit.strategy("{ours}"), or of no strategy',
            do=f'Make the strategy by tfdistkit.strategy("{ours}"). With the present strategy, {instead}.',
        )
    )
