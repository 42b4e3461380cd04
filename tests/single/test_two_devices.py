"""Runs tests of strategies with two devices, each file in a process of its own: TensorFlow has one device here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tensorflow

FOLDER = Path(__file__).with_name("two_devices")
DEADLINE_S = 280


@pytest.mark.parametrize("file", sorted(FOLDER.glob("[!_]*.py")), ids=lambda file: file.stem)
def test_with_two_devices(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
