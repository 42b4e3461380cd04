"""Plain data in backups, and frequencies."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import types
from typing import Any

import numpy as np
import pytest

from tfdistkit.errors import OptionError

pytestmark = pytest.mark.tensorflow

VALUES: list[Any] = [
    None, True, 3, -2**70, 0.1, math.inf, "text", [], (), {}, [1, (2.5, [None])], {"a": {1: (2,)}, (1, "b"): "c"},
    np.float32(0.1), np.int64(3), np.zeros([2, 0], np.float16), np.arange(6.0).reshape(2, 3).T,
    {"state": (3, tuple(range(5)), None), "arrays": [np.array(1.5), np.array([True, False])]},
    {"raw": b"\x00bytes", "none": b""}, types.SimpleNamespace(steps=1, losses=[0.5]), argparse.Namespace(steps=1),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_survives_a_round_trip(value: Any, tmp_path: pathlib.Path) -> None:
    from tfdistkit.callbacks.backup.backup_file import PARTS, read_backup, write_backup
    from tfdistkit.callbacks.backup.plain_data import decode, encode, fingerprint

    arrays: list[np.ndarray] = []
    coded = json.loads(json.dumps(encode(value, arrays)))
    again = decode(coded, arrays)
    assert type(again) is type(value) and fingerprint(again) == fingerprint(value)
    write_backup(str(tmp_path / "new" / "file"), {**dict.fromkeys(PARTS), "model": value})
    read = read_backup((tmp_path / "new" / "file").read_bytes(), "file")
    assert fingerprint(read["model"]) == fingerprint(value) != fingerprint([value])


def test_functions_of_keras_are_plain_data() -> None:
    import keras

    from tfdistkit.callbacks.backup.plain_data import decode, encode

    assert decode(encode([keras.ops.less], []), []) == [keras.ops.less]


def test_nan_and_bfloat16_survive_bit_for_bit(tmp_path: pathlib.Path) -> None:
    import tensorflow as tf

    from tfdistkit.callbacks.backup.backup_file import PARTS, read_backup, write_backup
    from tfdistkit.callbacks.backup.plain_data import fingerprint

    values: dict[str, Any] = {**dict.fromkeys(PARTS), "nan": math.nan}
    values["arrays"] = [np.array([np.nan, -0.0]), tf.constant([1.5, 2.0], tf.bfloat16).numpy()]
    write_backup(str(tmp_path / "file"), values)
    assert fingerprint(read_backup((tmp_path / "file").read_bytes(), "file")) == fingerprint(values)
    for a, b in [(0.0, -0.0), (1, True), (np.float32(1), np.float64(1)), (np.zeros(2), np.zeros([2, 1]))]:
        assert fingerprint(a) != fingerprint(b)


@pytest.mark.parametrize("value", [object(), {object()}, [len], {"a": 1j}, np.array([object()])], ids=repr)
def test_other_values_are_left_out(value: Any) -> None:
    from tfdistkit.callbacks.backup.plain_data import is_plain

    assert not is_plain(value)


@pytest.mark.parametrize(
    ("given", "amount", "unit"),
    [
        (5, 5, "steps"),
        ("epoch", 1, "epochs"),
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("2 epochs", 2, "epochs"),
        ("90 seconds", 90, "seconds"),
        ("0.5 seconds", 0.5, "seconds"),
        ("10 minutes", 600, "seconds"),
        ("2hours", 7200, "seconds"),
    ],
)
def test_frequencies(given: Any, amount: float, unit: str) -> None:
    from tfdistkit.callbacks.frequency import frequency_of

    found = frequency_of("every", given)
    assert (found.amount, found.unit) == (amount, unit)


@pytest.mark.parametrize("given", [0, -1, 1.5, True, None, "", "epochs", "0 steps", "1.5 steps", "3 weeks", []])
def test_invalid_frequencies_are_errors(given: Any) -> None:
    from tfdistkit.callbacks.frequency import frequency_of

    with pytest.raises(OptionError, match='`every` must be "epoch", a positive number of steps, .*Received: every='):
        frequency_of("every", given)
