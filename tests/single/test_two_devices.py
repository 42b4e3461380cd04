"""Runs tests of strategies with two devices, each file in a process of its own: TensorFlow has one device here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tensorflow

FOLDER = Path(__file__).with_name("two_devices")
DEADLINE_S = 280


# Models of many kinds that a check must accept; the other files try each kind of loss, state and read.
_THOROUGH = ("step_check_models",)
FILES = [
    pytest.param(file, id=file.stem, marks=[pytest.mark.thorough] * (file.stem in _THOROUGH))
    for file in sorted(FOLDER.glob("[!_]*.py"))
]


@pytest.mark.parametrize("file", FILES)
def test_with_two_devices(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
