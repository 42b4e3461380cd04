"""Deadlines of tests grow with the load of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import patience
import pytest

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize(("load", "seconds"), [(0.0, 10.0), (1.0, 10.0), (3.0, 30.0), (99.0, 40.0)])
def test_a_deadline_grows_with_the_load(monkeypatch: pytest.MonkeyPatch, load: float, seconds: float) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0 * load, 0.0, 0.0))
    assert patience.longer(10.0) == seconds


@pytest.mark.parametrize("wait", [lambda one, s: one.wait(s), lambda one, s: one.communicate(timeout=s)])
@pytest.mark.parametrize(("deadline", "waited"), [(10.0, 0.2), (0.1, 0.1)])
def test_processes_are_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch, wait: Any, deadline: float, waited: float
) -> None:
    monkeypatch.setattr(patience, "longer", lambda seconds, least: 0.2)
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired) as raised:
            wait(process, deadline)
        process.kill()
    assert raised.value.timeout == waited
