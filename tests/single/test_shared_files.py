"""Keras callbacks that write the same file on all ranks: one warning on the chief, with the replacement."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.tensorflow


def strategy(replicas: int = 2, is_chief: bool = True) -> SimpleNamespace:
    extended = SimpleNamespace(worker_devices=("CPU:0",), should_checkpoint=is_chief)
    return SimpleNamespace(is_tfdistkit_strategy=True, num_replicas_in_sync=replicas, extended=extended)


def test_one_warning_names_the_replacement(caplog: pytest.LogCaptureFixture) -> None:
    import keras

    from tfdistkit.callbacks import ChiefCheckpoint, ChiefOnly
    from tfdistkit.keras_adapter.fit import warn_of_shared_files

    class Own(keras.callbacks.CSVLogger):
        pass

    writers = [
        Own("log.csv"),
        keras.callbacks.TensorBoard("logs"),
        keras.callbacks.ModelCheckpoint("m.keras"),
        keras.callbacks.BackupAndRestore("backup"),
    ]
    quiet = [
        keras.callbacks.EarlyStopping(),
        ChiefOnly(keras.callbacks.CSVLogger("log.csv")),
        ChiefCheckpoint("model.keras"),
    ]
    with caplog.at_level(logging.WARNING):
        warn_of_shared_files(strategy(1), writers)
        warn_of_shared_files(strategy(is_chief=False), writers)
        warn_of_shared_files(strategy(), quiet)
        assert not caplog.records
        warn_of_shared_files(strategy(), writers)
        warn_of_shared_files(strategy(), writers)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 4
    for line, name in zip(
        warnings,
        (
            "ChiefOnly(keras.callbacks.CSVLogger",
            "ChiefOnly(keras.callbacks.TensorBoard",
            "ChiefCheckpoint",
            "BackupAndResume",
        ),
        strict=True,
    ):
        assert name in line
