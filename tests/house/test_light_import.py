"""Light imports load no heavy package: checked in a fresh process, by `sys.modules` and not by time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["tensorflow", "keras", "numpy", "horovod", "absl", "cloudpickle", "ray"]

LIGHT = {
    "import": "import tfdistkit",
    "dir": "import tfdistkit; dir(tfdistkit); tfdistkit.__all__; tfdistkit.__version__",
    "completion": "import rlcompleter, tfdistkit; rlcompleter.Completer({'it': tfdistkit}).complete('it.', 0)",
    "rank": "import tfdistkit; tfdistkit.rank(), tfdistkit.world_size(), tfdistkit.local_rank(), tfdistkit.is_chief()",
    "cluster": "import tfdistkit; tfdistkit.cluster.exchange_facts, tfdistkit.errors.OptionError",
    "env": "from tfdistkit.cli.main import main; main(['env', '--json'])",
    "data": "from tfdistkit.cli.main import main; main(['data', 'write', '--help'])",
    "run": "from tfdistkit.cli.main import main; main(['run', '--help'])",
    "help": "from tfdistkit.cli.main import main; main(['--help'])",
}


@pytest.mark.parametrize("name", LIGHT)
def test_loads_nothing_heavy(name: str) -> None:
    code = f"""
import json, sys
try:
    {LIGHT[name]}
except SystemExit as end:
    assert not end.code, end.code
print()
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == []


def test_a_heavy_package_is_detected() -> None:
    code = f"import json, sys, tfdistkit, numpy; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == ["numpy"]
