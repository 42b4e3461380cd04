"""What each backend tells a worker of the cluster: one launcher, three languages."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_entry_points import EntryPoint

from tfdistkit import env
from tfdistkit.cli.main import main
from tfdistkit.cli.run.command import job_of
from tfdistkit.cli.run.options import parse
from tfdistkit.cluster import ClusterSpec
from tfdistkit.cluster.environments import registry as environments
from tfdistkit.errors import OptionError
from tfdistkit.launcher import JobSpec, ProcessSpec, plan_processes, registry
from tfdistkit.launcher.mpi.backend import mpirun_command
from tfdistkit.launcher.placement import places_here
from tfdistkit.launcher.registry import BackendRow, row_of


def plan(backend: str, inherited: dict[str, str] | None = None, **variables: str) -> tuple[ProcessSpec, ...]:
    job = JobSpec(3, ("train.py",), Path("/logs"), env=variables, backend=backend)
    return plan_processes(job, places_here((5001, 5002, 5003), 8, inherited or {}), python="python")


STARTED = [name for name in registry.names() if row_of(name).launcher]


@pytest.mark.parametrize("backend", STARTED)
def test_every_backend_sets_rank_and_local_rank(backend: str) -> None:
    for rank, process in enumerate(plan(backend)):
        told = process.env
        assert (told[env.RANK], told[env.LOCAL_RANK], told[env.LOCAL_WORLD_SIZE]) == (str(rank), str(rank), "3")
        assert (env.TF_CONFIG in told) == (backend == "local")


def test_gloo() -> None:
    told = plan("horovod")[2].env
    assert {name: value for name, value in told.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "2",
        "HOROVOD_LOCAL_SIZE": "3",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "127.0.0.1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
    }


def test_mpirun_sets_the_rank_itself() -> None:
    told = plan("mpi")[2].env
    assert {name: value for name, value in told.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "mpi",
    }


def test_roles_under_mpi_come_from_tf_config() -> None:
    job = JobSpec(2, ("train.py",), Path("/logs"), backend="mpi", ps=1)
    processes = plan_processes(job, places_here((5001, 5002, 5003, 5004), 8, {}), python="python")
    assert job.size == 4 and [one.number for one in processes] == [0, 1, 2, 3]
    for one, role in zip(processes, ("chief", "worker", "worker", "ps"), strict=True):
        assert json.loads(one.env[env.TF_CONFIG])["task"]["type"] == role
        assert one.env[env.CLUSTER] == "tf_config" and "HOROVOD_CONTROLLER" not in one.env
    asked = replace(job, env={env.CLUSTER: "mpi"})
    with pytest.raises(OptionError, match=f"sets for each worker: .* Received: {env.CLUSTER}=mpi"):
        plan_processes(asked, places_here((5001, 5002, 5003, 5004), 8, {}), python="python")


def test_the_interface_is_the_users() -> None:
    assert plan("horovod", HOROVOD_GLOO_IFACE="eth0")[0].env["HOROVOD_GLOO_IFACE"] == "eth0"
    assert "HOROVOD_GLOO_IFACE" not in plan("horovod", {"HOROVOD_GLOO_IFACE": "eth1"})[0].env


@pytest.mark.parametrize("backend", ["horovod", "mpi"])
def test_the_rest_is_not(backend: str) -> None:
    for name in row_of(backend).variables(ClusterSpec({"worker": ("127.0.0.1:1",)})):
        with pytest.raises(OptionError, match=f"sets for each worker: .* Received: {name}=9"):
            plan(backend, **{name: "9"})
    assert plan("local", HOROVOD_RANK="9")[0].env["HOROVOD_RANK"] == "9"


def test_roles_are_for_backends_that_can_tell_them() -> None:
    for backend in registry.names():
        if not row_of(backend).has_roles:
            with pytest.raises(OptionError, match=f"{backend}', which has no parameter servers. Received: ps=1,"):
                JobSpec(2, ("train.py",), Path("/logs"), backend=backend, ps=1)
            assert JobSpec(2, ("train.py",), Path("/logs"), backend=backend, max_restarts=2).max_restarts == 2


def test_a_scheduler_gets_its_jobs_from_the_command() -> None:
    with pytest.raises(OptionError, match="only `tfdistkit run` submits jobs to SLURM. Received: backend='slurm'"):
        plan("slurm")


def test_an_unknown_backend() -> None:
    match = "`backend` must be one of: local, horovod, mpi, ray, slurm. Did you mean 'mpi'.* Received: backend='mpirun'"
    with pytest.raises(OptionError, match=match):
        JobSpec(1, ("train.py",), Path("/logs"), backend="mpirun")


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (
            ImportError("no package"),
            "cannot be loaded: ImportError: no package.\nFix or uninstall .*package.module:NAME",
        ),
        (dict(launcher="x"), "must be a tfdistkit.launcher.registry.BackendRow. Received: package.module:NAME, a dict"),
    ],
)
def test_entry_points_that_are_wrong(monkeypatch: pytest.MonkeyPatch, loaded: object, message: str) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda _: (EntryPoint("of others", loaded),))
    with pytest.raises(OptionError, match=message):
        JobSpec(1, ("train.py",), Path("/logs"), backend="of others")


def test_a_backend_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    row = BackendRow("collections:OrderedDict", lambda cluster: {"MY_RANK": str(cluster.rank)})
    monkeypatch.setattr(registry, "entry_points", lambda _: (EntryPoint("of others", row),))
    assert registry.names() == ["local", "horovod", "mpi", "ray", "slurm", "of others"]
    assert [one.env["MY_RANK"] for one in plan("of others")] == ["0", "1", "2"]
    with pytest.raises(OptionError, match="'of others', which has no parameter servers"):
        JobSpec(2, ("train.py",), Path("/logs"), backend="of others", ps=1)


def test_a_backend_of_another_package_has_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Starting:
        def __init__(self, job_id: str, size: int, options: object = None):
            self.made_with = (job_id, size, options)

    module: Any = types.ModuleType("queue_options")
    module.add_to = lambda parser: parser.add_argument("--queue", help="the queue")
    module.read = lambda found, error: error("--queue must be long.") if found.queue == "x" else found.queue
    module.Starting = Starting
    monkeypatch.setitem(sys.modules, "queue_options", module)
    row = BackendRow("queue_options:Starting", lambda cluster: {}, options="queue_options")
    monkeypatch.setattr(registry, "entry_points", lambda _: (EntryPoint("queued", row),))
    script = tmp_path / "train.py"
    script.touch()
    job = job_of(parse(["-np", "2", "--backend", "queued", "--queue", "long", str(script)]), None)
    made = registry.load_backend(job.backend, "id", job.size, job.mpi_args, job.backend_options)
    assert made.made_with == ("id", 2, "long")
    assert job_of(parse(["-np", "2", "--backend=queued", str(script)]), None).backend_options is None
    for words in (["--backend", "queued", "--queue", "x"], ["--queue", "long"]):
        with pytest.raises(SystemExit):
            parse(["-np", "2", *words, str(script)])
    shown = capsys.readouterr().err
    assert "--queue must be long." in shown and "--queue" in shown.splitlines()[-2]


@pytest.mark.parametrize("words", (["run", "--backend", "theirs", "-np", "1", "train.py"], ["env"]))
def test_a_command_names_the_package_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    for where in (registry, environments):
        monkeypatch.setattr(where, "entry_points", lambda _: (EntryPoint("theirs", ImportError("no package")),))
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"tfdistkit {words[0]}: The entry point 'theirs' cannot be loaded: ImportError: no package")


def test_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mpirun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = mpirun_command(3, ["a", "b"], is_root=True)
    assert command[0] == str(tmp_path / "mpirun") and command[-4:] == ["-np", "3", "a", "b"]
    assert "--allow-run-as-root" in command and {"--oversubscribe", "--bind-to"} <= set(command)
    assert "--allow-run-as-root" not in mpirun_command(3, ["a"], is_root=False)
