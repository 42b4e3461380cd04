"""The import contracts in setup.cfg hold, and detect a violation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def contracts_hold(folder: Path) -> tuple[bool, str]:
    """Checks the contracts of setup.cfg against the package in a folder."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports('setup.cfg', no_cache=True))"
    command = [sys.executable, "-c", code]
    # `-c` puts the current folder first on sys.path, so the package there is checked.
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return result.returncode == 0, result.stdout + result.stderr


def test_contracts_hold() -> None:
    hold, output = contracts_hold(ROOT)
    assert hold, output


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("env", "import tfdistkit.cluster", "downward only"),
        ("cluster/ports", "import tfdistkit.report", "downward only"),
        ("cluster/ports", "import numpy", "load no TensorFlow"),
        ("launcher/spec", "import tensorflow", "load no TensorFlow"),
        ("launcher/spec", "import tfdistkit.supervise", "downward only"),
        ("launcher/spec", "import tfdistkit.callbacks", "never import each other"),
        ("data/sharding", "import tfdistkit.launcher", "never import each other"),
        ("data/sharding", "import tfdistkit.callbacks", "downward only"),
    ],
)
def test_a_violation_is_detected(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(ROOT / "tfdistkit", tmp_path / "tfdistkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    file = tmp_path / "tfdistkit" / f"{module}.py"
    file.write_text(f"{file.read_text()}\n{line}\n")
    hold, output = contracts_hold(tmp_path)
    assert not hold
    broken = [row for row in output.splitlines() if row.endswith("BROKEN")]
    assert any(contract in row for row in broken), output
