"""Lets tests wait longer on a slow or busy machine: their deadlines are those of two fast idle cores."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
from typing import Any

import pytest
import pytest_timeout

# Shorter waits look whether something happens at all.
_DEADLINE_S = 10.0
# What ends a test that hangs waits for a slow machine, whose load shows nothing. What a test asserts does not.
_LEAST = 2.0
_MOST = 4.0


def longer(seconds: float, least: float = 1.0) -> float:
    """Returns a deadline for as many processes as run now.

    Args:
        seconds: The deadline with one process for each core.
        least: How many times as long it is at least; at most it is 4 times as long.
    """
    return seconds * min(max(os.getloadavg()[0] / (os.cpu_count() or 1), least), _MOST)


def install() -> None:
    """Lets `subprocess.run`, `wait` and `communicate` of this process wait longer."""
    for name in ("wait", "communicate"):
        setattr(subprocess.Popen, name, _patient(getattr(subprocess.Popen, name)))


def _patient(method: Any) -> Any:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        timeout = given.arguments.get("timeout")
        if timeout is not None and timeout >= _DEADLINE_S:
            given.arguments["timeout"] = longer(timeout, _LEAST)
        return method(*given.args, **given.kwargs)

    return waiting


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """Gives a test a longer time limit."""
    if not settings.timeout:
        return None
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=longer(settings.timeout, _LEAST)))
