"""Which frames of a stack are the user's: errors name the line of these."""

from __future__ import annotations

import os
import sysconfig
from typing import Any

import pytest

import tfdistkit
from tfdistkit.report.tracebacks import is_of_library

_OWN = os.path.dirname(os.path.abspath(tfdistkit.__file__))
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = sysconfig.get_path("purelib")


def _frame(file: str, name: str) -> Any:
    kept: dict[str, Any] = {"__name__": name}
    exec(compile("import sys; frame = sys._getframe()", file, "exec"), kept)
    return kept["frame"]


@pytest.mark.parametrize(
    "file, name",
    [
        (f"{_OWN}/keras_adapter/private_lookup.py", "tfdistkit.keras_adapter.private_lookup"),
        (f"{_INSTALLED}/keras/src/trainers/trainer.py", "keras.src.trainers.trainer"),
        (f"{_INSTALLED}/tensorflow/python/util/traceback_utils.py", "tensorflow.python.util.traceback_utils"),
        (f"{_STANDARD}/copy.py", "copy"),
        (f"{_STANDARD}/concurrent/futures/thread.py", "concurrent.futures.thread"),
        ("<frozen runpy>", "runpy"),
        ("/tmp/__autograph_generated_file1.py", "__main__"),
    ],
)
def test_frames_of_libraries(file: str, name: str) -> None:
    assert is_of_library(_frame(file, name))


@pytest.mark.parametrize(
    "file, name",
    [
        ("/srv/ann/train.py", "__main__"),
        (f"{_STANDARD}/train.py", "__main__"),  # Somebody keeps scripts there.
        (f"{_STANDARD}/models.py", "models"),
        ("/srv/ann/code.py", "code"),  # A module of the standard library has this name.
        ("/srv/ann/tfdistkit/train.py", "__main__"),  # A clone of the repository.
        ("/srv/ann/keras_models/net.py", "keras_models.net"),
    ],
)
def test_frames_of_the_user(file: str, name: str) -> None:
    assert not is_of_library(_frame(file, name))
