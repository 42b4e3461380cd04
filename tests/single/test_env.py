"""Environment variables are read in one place."""

from __future__ import annotations

import os

import pytest

from tfdistkit import env
from tfdistkit.errors import ClusterConfigError


def test_empty_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.RUN_DIR, "")
    assert env.text(env.RUN_DIR) is None
    assert env.integer(env.RUN_DIR) is None


def test_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.LOCAL_RANK, "12")
    assert env.integer(env.LOCAL_RANK) == 12
    monkeypatch.setenv(env.LOCAL_RANK, "twelve")
    with pytest.raises(ClusterConfigError, match="`TFDISTKIT_LOCAL_RANK` must be an integer. Received: 'twelve'"):
        env.integer(env.LOCAL_RANK)


def test_child_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDISTKIT_KEPT", "1")
    monkeypatch.setenv("TFDISTKIT_REMOVED", "1")
    child = env.child_env({"TFDISTKIT_REMOVED": None, "TFDISTKIT_ABSENT": None, "TFDISTKIT_NEW": "2"})
    assert (child["TFDISTKIT_KEPT"], child["TFDISTKIT_NEW"]) == ("1", "2")
    assert "TFDISTKIT_REMOVED" not in child
    assert os.environ["TFDISTKIT_REMOVED"] == "1", "this process keeps its own environment"
