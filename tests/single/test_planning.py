"""JobSpec -> ProcessSpecs, without processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfdistkit import env
from tfdistkit.cluster import from_tf_config
from tfdistkit.errors import OptionError
from tfdistkit.launcher import JobSpec, ProcessSpec, plan_processes
from tfdistkit.launcher.placement import places_here
from tfdistkit.launcher.planning import plan_again
from tfdistkit.launcher.spec import make_folders
from tfdistkit.report import ProcessName


def plan(
    np: int = 2, *, cores: int = 8, inherited: dict[str, str] | None = None, attempt: int = 0, **options: Any
) -> tuple[ProcessSpec, ...]:
    job = JobSpec(np, ("train.py", "--lr", "1"), Path("/logs"), **options)
    count = np + (1 + job.ps if job.ps else 0)
    ports = range(5000, 5000 + count)
    return plan_processes(job, places_here(ports, cores, inherited or {}), python="python", attempt=attempt)


def test_each_rank_gets_its_cluster() -> None:
    for rank, process in enumerate(plan(3)):
        assert (process.name, str(process.name)) == (ProcessName(rank), f"rank {rank}")
        assert process.command == ("python", "-m", "tfdistkit.worker", "train.py", "--lr", "1")
        assert process.folder == Path(f"/logs/rank.{rank}")
        assert process.stdout_path == Path(f"/logs/rank.{rank}/stdout")
        cluster = from_tf_config(process.env[env.TF_CONFIG])
        assert cluster.workers == ("127.0.0.1:5000", "127.0.0.1:5001", "127.0.0.1:5002")
        assert (cluster.rank, cluster.local_rank, cluster.local_world_size) == (rank, rank, 3)
        assert (process.env[env.RANK], process.env[env.LOCAL_RANK]) == (str(rank), str(rank))
        assert (process.env[env.LOCAL_WORLD_SIZE], process.env[env.RUN_DIR]) == ("3", "/logs")
        assert (process.env[env.TASK_DIR], process.env[env.ATTEMPT]) == (f"/logs/rank.{rank}", "0")


def test_each_role_gets_its_cluster() -> None:
    processes = plan(2, ps=2)
    names = ["chief", "worker 0", "worker 1", "ps 0", "ps 1"]
    assert [process.name.label for process in processes] == [str(process.name) for process in processes] == names
    for process in processes:
        config = json.loads(process.env[env.TF_CONFIG])
        assert config["cluster"] == {
            "chief": ["127.0.0.1:5000"],
            "worker": ["127.0.0.1:5001", "127.0.0.1:5002"],
            "ps": ["127.0.0.1:5003", "127.0.0.1:5004"],
        }
        role, index = config["task"]["type"], config["task"]["index"]
        assert process.name == ProcessName(index, role)
        assert process.folder == Path(f"/logs/{role}.{index}") and process.env[env.TASK_DIR] == str(process.folder)
        assert process.command == ("python", "-m", "tfdistkit.worker", "train.py", "--lr", "1")
        place = (process.env[env.RANK], process.env[env.LOCAL_RANK], process.env[env.LOCAL_WORLD_SIZE])
        assert place == ((str(index), str(index), "2") if role == "worker" else (str(index), "0", "1"))


@pytest.mark.parametrize(
    ("np", "cores", "asked", "expected"),
    [
        (2, 32, None, {"worker": ("16", "16", "16"), "chief": ("4", "4", "4"), "ps": ("4", "4", "4")}),
        (2, 2, None, {"worker": ("1", "2", "1"), "chief": ("1", "2", "1"), "ps": ("1", "2", "1")}),
        (1, 2, None, {"worker": ("2", "2", "2"), "chief": ("2", "2", "2"), "ps": ("2", "2", "2")}),
        (2, 8, 6, {"worker": ("6", "6", "6"), "chief": ("4", "4", "4"), "ps": ("4", "4", "4")}),
    ],
)
def test_workers_share_the_cores_and_servers_get_few(
    np: int, cores: int, asked: int | None, expected: dict[str, tuple[str, str, str]]
) -> None:
    names = (env.INTRA_OP_THREADS, env.INTER_OP_THREADS, env.OMP_THREADS)
    for process in plan(np, cores=cores, threads_per_worker=asked, ps=1):
        assert tuple(process.env[name] for name in names) == expected[process.name.role or ""], process.name


def test_a_later_attempt_has_its_own_folders_and_number() -> None:
    assert [process.folder for process in plan(2, attempt=2)] == [
        Path("/logs/attempt.2/rank.0"),
        Path("/logs/attempt.2/rank.1"),
    ]
    (process, *_) = plan(1, ps=1, attempt=1)
    assert process.env[env.TASK_DIR] == str(process.folder) == "/logs/attempt.1/chief.0"
    assert (process.env[env.ATTEMPT], process.env[env.RUN_DIR]) == ("1", "/logs")


def test_a_restarted_process_differs_only_in_its_folder() -> None:
    worker = plan(2, ps=1)[2]
    again = plan_again(worker, 2)
    assert again.folder == Path("/logs/worker.1/restart.2")
    assert again.env == {**worker.env, env.TASK_DIR: str(again.folder)}
    assert (again.command, again.name) == (worker.command, worker.name)


def test_a_single_worker_is_a_cluster_of_one() -> None:
    (process,) = plan(1)
    assert json.loads(process.env[env.TF_CONFIG])["cluster"] == {"worker": ["127.0.0.1:5000"]}


@pytest.mark.parametrize(
    ("np", "cores", "asked", "inherited", "job_env", "expected"),
    [
        (1, 8, None, {}, {}, ("8", "8", "8")),
        (2, 8, None, {}, {}, ("4", "4", "4")),
        (3, 8, None, {}, {}, ("2", "2", "2")),
        (2, 2, None, {}, {}, ("1", "2", "1")),
        (8, 2, None, {}, {}, ("1", "2", "1")),
        (2, 8, 3, {}, {}, ("3", "3", "3")),
        (2, 8, 1, {}, {}, ("1", "2", "1")),
        (2, 8, None, {env.OMP_THREADS: "6"}, {}, ("4", "4", None)),
        (2, 8, None, {env.INTRA_OP_THREADS: "6", env.INTER_OP_THREADS: "5"}, {}, (None, None, "4")),
        (2, 8, None, {env.OMP_THREADS: ""}, {}, ("4", "4", "4")),
        (2, 8, 3, {env.OMP_THREADS: "6"}, {}, ("3", "3", "3")),
        (2, 8, 3, {}, {env.INTER_OP_THREADS: "9"}, ("3", "9", "3")),
        (2, 8, None, {}, {env.INTRA_OP_THREADS: "0"}, ("0", "4", "4")),
    ],
)
def test_workers_share_the_cores_of_a_host(
    np: int,
    cores: int,
    asked: int | None,
    inherited: dict[str, str],
    job_env: dict[str, str],
    expected: tuple[str | None, str | None, str | None],
) -> None:
    names = (env.INTRA_OP_THREADS, env.INTER_OP_THREADS, env.OMP_THREADS)
    for process in plan(np, cores=cores, inherited=inherited, threads_per_worker=asked, env=job_env):
        assert tuple(process.env.get(name) for name in names) == expected


def test_output_is_unbuffered_by_default() -> None:
    assert plan()[0].env[env.UNBUFFERED] == "1"
    assert env.UNBUFFERED not in plan(inherited={env.UNBUFFERED: ""})[0].env


def test_only_a_single_worker_reads_stdin() -> None:
    assert plan(1, passes_stdin=True)[0].passes_stdin
    assert not any(process.passes_stdin for process in plan(2, passes_stdin=True))
    assert not plan(1)[0].passes_stdin
    assert not any(process.passes_stdin for process in plan(1, passes_stdin=True, ps=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 0}, "`np` must be an integer >= 1. Received: np=0"),
        ({"np": True}, "`np`"),
        ({"np": 2.0}, "`np`"),
        ({"threads_per_worker": 0}, "`threads_per_worker`"),
        ({"ps": -1}, "`ps` must be an integer >= 0. Received: ps=-1"),
        ({"ps": 1.0}, "`ps`"),
        ({"max_restarts": -1}, "`max_restarts` must be an integer >= 0. Received: max_restarts=-1"),
        ({"ps": 1, "backend": "horovod"}, "`ps` must be 0 with the backend 'horovod'"),
        ({"timeout_s": 0.0}, "`timeout` must be a positive number of seconds. Received: timeout=0.0"),
        ({"timeout_s": float("nan")}, "`timeout`"),
        ({"env": {"A=B": "1"}}, "`env` must map variable names to strings"),
        ({"env": {"A": 1}}, "`env` must map variable names to strings"),
        ({"env": {env.TF_CONFIG: "{}"}}, "that the launcher sets for each worker"),
        ({"env": {env.LOCAL_RANK: "1"}}, "that the launcher sets for each worker"),
        ({"env": {env.ATTEMPT: "1"}}, "that the launcher sets for each worker"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        JobSpec(options.pop("np", 2), ("train.py",), Path("/logs"), **options)
    assert message in str(error.value)


def test_two_jobs_have_different_marks() -> None:
    assert JobSpec(1, (), Path()).job_id != JobSpec(1, (), Path()).job_id


def test_folders_are_created_and_old_crash_records_removed(tmp_path: Path) -> None:
    earlier = ["rank.5", "ps.0", "attempt.1/worker.1", "attempt.1/worker.1/restart.1"]
    for folder in earlier:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "error.json").touch()
    (tmp_path / "rank.5" / "stdout").touch()
    (tmp_path / "error.json").touch()  # not ours
    make_folders(tmp_path, plan_processes(JobSpec(2, (), tmp_path), places_here((1, 2), 1, {}), python="python"))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == sorted(
        ["attempt.1", *earlier, "rank.0", "rank.1", "rank.5/stdout", "error.json"]
    )


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="The folder for the logs cannot be used"):
        make_folders(tmp_path / "file" / "logs", [replace(plan(1)[0], folder=tmp_path / "file" / "logs" / "rank.0")])
