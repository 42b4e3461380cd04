"""Environments of other packages, and hosts that a scheduler allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_entry_points import EntryPoint

from tfdistkit import env
from tfdistkit.cli.run.options import parse
from tfdistkit.cluster import ClusterSpec, TaskSpec, detect_cluster
from tfdistkit.cluster.environments import registry
from tfdistkit.cluster.environments.registry import Environment
from tfdistkit.errors import ClusterConfigError


def read_cobalt() -> ClusterSpec | None:
    rank, hosts = env.integer("COBALT_RANK"), env.text("COBALT_NODES")
    if rank is None or hosts is None:
        return None
    return ClusterSpec({"worker": tuple(hosts.split(","))}, TaskSpec("worker", rank), source="COBALT_RANK")


@pytest.fixture
def cobalt(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Environment("cobalt", ("COBALT_RANK", "COBALT_NODES"), read_cobalt)
    monkeypatch.setattr(registry, "entry_points", lambda _: (EntryPoint("cobalt", own),))
    monkeypatch.setenv("COBALT_RANK", "1")
    monkeypatch.setenv("COBALT_NODES", "a:1,b:2")


@pytest.mark.usefixtures("cobalt")
def test_an_environment_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (detect_cluster().rank, detect_cluster().world_size) == (1, 2)
    monkeypatch.setenv(env.CLUSTER, "cobalt")
    assert detect_cluster().source == "COBALT_RANK"
    monkeypatch.setenv(env.CLUSTER, "colbat")
    with pytest.raises(ClusterConfigError, match="Did you mean 'cobalt'"):
        detect_cluster()


@pytest.mark.usefixtures("cobalt")
def test_it_has_to_agree_with_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(ClusterConfigError, match="must describe the same job"):
        detect_cluster()


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (ImportError("no package"), "'cobalt' cannot be loaded: ImportError: no package.\nFix or uninstall"),
        (read_cobalt, "must be a tfdistkit.cluster.environments.registry.Environment. Received: package.module"),
    ],
)
def test_entry_points_that_are_wrong(monkeypatch: pytest.MonkeyPatch, loaded: object, message: str) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda _: (EntryPoint("cobalt", loaded),))
    with pytest.raises(ClusterConfigError, match=message):
        detect_cluster()


def test_run_starts_on_the_hosts_of_grid_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.touch()
    hosts.write_text("a 4 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n")
    monkeypatch.setenv("PE_HOSTFILE", str(hosts))
    options = parse([str(script)])
    assert options.hosts is not None and options.np == 6
    assert [(one.host, one.slots) for one in options.hosts.slots] == [("a", 4), ("b", 2)]
    assert parse(["-np", "3", str(script)]).np == 3
    named = parse(["-H", "c:1", str(script)]).hosts
    assert named is not None and [one.host for one in named.slots] == ["c"]
    hosts.write_text("a 4 all.q@a UNDEFINED\n")
    assert parse(["-np", "2", str(script)]).hosts is None, "one host is this machine"


def test_a_host_list_that_is_wrong_is_an_error_of_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PE_HOSTFILE", str(tmp_path / "none"))
    with pytest.raises(SystemExit) as ended:
        parse([str(tmp_path / "train.py")])
    assert ended.value.code == 2
    assert "`PE_HOSTFILE` must name a readable file" in capsys.readouterr().err
