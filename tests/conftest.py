"""Fixtures for all tests: an environment in which this process belongs to no cluster."""

from __future__ import annotations

import os

import pytest

from tfdistkit import env


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test inherits a cluster from the shell, or from another test."""
    for name in list(os.environ):
        if name == env.TF_CONFIG or name.startswith("TFDISTKIT_"):
            monkeypatch.delenv(name)
