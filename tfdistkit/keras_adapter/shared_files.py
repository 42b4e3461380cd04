"""Warns of callbacks that write the same file on all ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import keras

from tfdistkit.keras_adapter import private_api

_LOG = logging.getLogger(__name__)

# Keras callbacks that write files, and their replacements; also for subclasses.
_INSTEAD = {
    "ModelCheckpoint": "tfdistkit.callbacks.ChiefCheckpoint(...)",
    "BackupAndRestore": "tfdistkit.callbacks.BackupAndResume(...)",
    "TensorBoard": "tfdistkit.callbacks.ChiefOnly(keras.callbacks.TensorBoard(...))",
    "CSVLogger": "tfdistkit.callbacks.ChiefOnly(keras.callbacks.CSVLogger(...))",
}


def warn_of_shared_files(strategy: Any, callbacks: Iterable[Any]) -> None:
    """Warns, on the chief and once per process, of Keras callbacks that write the same files on every rank.

    Args:
        strategy: The strategy of the model.
        callbacks: The callbacks of `fit`.
    """
    if not private_api.is_ours(strategy):
        return
    several = strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)
    if not several or not strategy.extended.should_checkpoint:
        return
    of_keras = [one for one in callbacks if not type(one).__module__.startswith("tfdistkit.")]
    for callback in of_keras:
        for name, instead in _INSTEAD.items():
            if isinstance(callback, getattr(keras.callbacks, name)):
                _warn(name, instead)


@functools.cache
def _warn(name: str, instead: str) -> None:
    _LOG.warning(
        "%s writes on every rank of this job: ranks that share a disk overwrite each other's file. Pass `fit` %s on "
        "every rank, or a separate file name on each.",
        name,
        instead,
    )
