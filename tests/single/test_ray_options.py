"""`--backend ray` without Ray: its options, its errors, and the order of ranks on its nodes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import tfdistkit
from tfdistkit.cli.run.options import RunOptions, parse
from tfdistkit.errors import MissingDependencyError, OptionError
from tfdistkit.launcher.ray.backend import Launcher
from tfdistkit.launcher.ray.cluster import RaySpec
from tfdistkit.launcher.ray.connection import ActorConnection, Pipes
from tfdistkit.launcher.ray.nodes import ranks_by_node
from tfdistkit.launcher.ray.problems import error_of
from tfdistkit.launcher.spec import JobSpec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, and no cluster in the variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "train.py").touch()
    return tmp_path


def options(*words: str) -> RunOptions:
    return parse(["--backend", "ray", "-np", "2", *words, "train.py"])


def cluster(*words: str) -> RaySpec:
    hosts = options(*words).hosts
    assert isinstance(hosts, RaySpec)
    return hosts


def test_the_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster() == RaySpec((), "", str(folder))
    assert options().hang_timeout_s == 600
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert cluster().ray_address == "head:6379"
    words = ("--ray-address", "ray://head:10001", "--cpus-per-worker", "4", "--gpus-per-worker", "0.5")
    found = cluster(*words, "--start-timeout", "90", "--working-dir", "/data", "--python", "/py")
    assert found == RaySpec((), "/py", "/data", None, None, None, 90.0, "ray://head:10001", 4.0, 0.5)
    assert found.threads == 4 and cluster("--cpus-per-worker", "0.5").threads == 1


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "[fd00::1]:6379", "ray://head:10001"])
def test_addresses(address: str) -> None:
    assert cluster("--ray-address", address).ray_address == address


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "ray", "-np", "1:2", "--host-discovery-script", "x"], "Remove --host-discovery-script."),
        (["--backend", "ray", "-np", "2", "-H", "h1"], "Ray chooses the hosts, and needs no ssh. Remove -H."),
        (["--backend", "ray", "-np", "2", "--ssh-port", "2"], "Remove --ssh-port."),
        (["--backend", "ray", "-np", "2", "--ray-address", "head"], "must be the address of a Ray cluster"),
        (["--backend", "ray", "-np", "2", "--cpus-per-worker", "1.5"], "`--cpus-per-worker` must be a whole number"),
        (["--backend", "ray", "-np", "2", "--cpus-per-worker", "0"], "Received: --cpus-per-worker 0."),
        (["--backend", "ray", "-np", "2", "--gpus-per-worker", "2"], "must be at most 1"),
        (["--backend", "ray", "-np", "2", "--gpus-per-worker", "nan"], "Received: --gpus-per-worker nan."),
        (["--backend", "ray", "-np", "2", "--isolate"], "--isolate requires a job on this machine"),
        (["--backend", "ray"], "-np"),
        (["-np", "2", "--ray-address", "local"], "--ray-address is for Ray: add --backend ray."),
        (["-np", "2", "--gpus-per-worker", "1"], "--gpus-per-worker is for Ray: add --backend ray."),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*words, "train.py"])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"(?s)package `ray`.*pip install 'ray"):
        Launcher(JobSpec(2, ("train.py",), folder, backend="ray", hosts=cluster()))


def test_functions_are_not_started_on_ray() -> None:
    with pytest.raises(OptionError, match="tfdistkit run --backend ray"):
        tfdistkit.launch(print, backend="ray")  # type: ignore[call-overload]


def test_workers_of_a_node_are_neighbours() -> None:
    assert ranks_by_node(["a", "b", "a", "c", "b"], ["worker"] * 5) == [0, 2, 1, 4, 3]
    # The coordinator and the servers keep their actors: these may have no GPU.
    assert ranks_by_node(["b", "a", "b", "a", "a"], ["chief", "worker", "worker", "worker", "ps"]) == [0, 2, 1, 3, 4]


def test_what_a_cluster_lacks() -> None:
    facts = {"kind": "resources", "asked": {"CPU": 8.0, "GPU": 2.0}, "waited_s": 30.0}
    lacks = str(error_of({**facts, "total": {"CPU": 4.0, "GPU": 2.0}, "free": {"CPU": 1.0, "GPU": 2.0}}))
    assert "8 CPUs and 2 GPUs for the workers; the cluster has 4 CPUs and 2 GPUs, free: 1 CPU and 2 GPUs" in lacks
    assert "within 30 s (--start-timeout)" in lacks and "--cpus-per-worker 0.5" in lacks
    busy = str(error_of({**facts, "total": {"CPU": 8.0, "GPU": 2.0}, "free": {"CPU": 1.0, "GPU": 2.0}}))
    assert "Wait until other jobs end" in busy


@pytest.mark.parametrize("said", [b"The actor died: its node has died.\n", b""])
def test_how_an_actor_was_lost(said: bytes) -> None:
    pipes = Pipes()
    connection = ActorConnection("node1", pipes, b"agent\n")
    connection._note(said)
    connection._listen(b"")
    connection.poll(0.0, was_suspended=False)
    assert connection.loss is not None and connection.loss.lost_with == "its Ray actor on"
    assert connection.loss.text == (said.decode().strip() or connection.loss.text)
    assert said or "The Ray driver of the job died" in connection.loss.text
    pipes.close_driver_ends()
    for pipe in (pipes.stdin, pipes.stdout, pipes.stderr):
        assert pipe is not None
        pipe.close()
