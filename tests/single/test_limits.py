"""A typing error does not start thousands of processes; a limit of the system is named."""

from __future__ import annotations

import resource

import pytest

from tfdistkit.errors import OptionError
from tfdistkit.launcher.local import limits


def test_too_many_processes_are_rejected() -> None:
    with pytest.raises(OptionError, match="must be at most 512 on this machine. Received: 4000 processes on 2 cores."):
        limits.require_room(4000, 2)


def test_the_limit_of_open_files_is_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (128, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: raised.append(pair))
    limits.require_room(8, 8)
    assert raised == []
    limits.require_room(100, 8)
    assert raised == [(364, 1000)]
    with pytest.raises(
        OptionError,
        match=r"`ulimit -n`.* must be at least 1564 for 500 processes. Received: a hard limit of 1000 files",
    ):
        limits.require_room(500, 8)


def test_the_plan_of_many_processes_takes_time_in_proportion() -> None:
    """Addresses are serialised once, and hosts are counted once."""
    from tfdistkit.cluster import tf_config
    from tfdistkit.cluster.spec import ClusterSpec, TaskSpec

    addresses = {"worker": tuple(f"127.0.0.1:{20_000 + i}" for i in range(500))}
    tf_config._cluster_to_json.cache_clear()
    for index in range(500):
        tf_config.to_tf_config(ClusterSpec(addresses, TaskSpec("worker", index)))
    assert tf_config._cluster_to_json.cache_info().misses == 1
