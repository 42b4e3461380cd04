"""JobSpec -> ProcessSpecs: pure, so a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfdistkit import env
from tfdistkit.cluster import from_tf_config
from tfdistkit.errors import OptionError
from tfdistkit.launcher import JobSpec, ProcessSpec, plan_processes
from tfdistkit.launcher.spec import make_folders


def plan(
    np: int = 2, *, cores: int = 8, inherited: dict[str, str] | None = None, **options: Any
) -> tuple[ProcessSpec, ...]:
    job = JobSpec(np, ("train.py", "--lr", "1"), Path("/logs"), **options)
    return plan_processes(job, ports=range(5000, 5000 + np), cores=cores, inherited=inherited or {}, python="python")


def test_each_rank_gets_its_place() -> None:
    for rank, process in enumerate(plan(3)):
        assert process.rank == rank
        assert process.command == ("python", "-m", "tfdistkit.worker", "train.py", "--lr", "1")
        assert process.folder == Path(f"/logs/rank.{rank}")
        assert process.stdout_path == Path(f"/logs/rank.{rank}/stdout")
        cluster = from_tf_config(process.env[env.TF_CONFIG])
        assert cluster.workers == ("127.0.0.1:5000", "127.0.0.1:5001", "127.0.0.1:5002")
        assert (cluster.rank, cluster.local_rank, cluster.local_world_size) == (rank, rank, 3)
        assert (process.env[env.RANK], process.env[env.LOCAL_RANK]) == (str(rank), str(rank))
        assert (process.env[env.LOCAL_WORLD_SIZE], process.env[env.RUN_DIR]) == ("3", "/logs")


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
def test_the_cores_are_shared_out(
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


def test_output_is_unbuffered_unless_the_user_says_otherwise() -> None:
    assert plan()[0].env[env.UNBUFFERED] == "1"
    assert env.UNBUFFERED not in plan(inherited={env.UNBUFFERED: ""})[0].env


def test_only_a_single_worker_reads_stdin() -> None:
    assert plan(1, passes_stdin=True)[0].passes_stdin
    assert not any(process.passes_stdin for process in plan(2, passes_stdin=True))
    assert not plan(1)[0].passes_stdin


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 0}, "`np` is not a number of them. Received: 0. Expected: 1 or more"),
        ({"np": True}, "`np`"),
        ({"np": 2.0}, "`np`"),
        ({"threads_per_worker": 0}, "`threads_per_worker`"),
        ({"timeout_s": 0.0}, "`timeout` is not a time. Received: 0.0"),
        ({"timeout_s": float("nan")}, "`timeout`"),
        ({"env": {"A=B": "1"}}, "`env` holds what cannot be a variable"),
        ({"env": {"A": 1}}, "`env` holds what cannot be a variable"),
        ({"env": {env.TF_CONFIG: "{}"}}, "the launcher itself gives"),
        ({"env": {env.LOCAL_RANK: "1"}}, "the launcher itself gives"),
    ],
)
def test_what_cannot_be_wanted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        JobSpec(options.pop("np", 2), ("train.py",), Path("/logs"), **options)
    assert message in str(error.value)


def test_two_jobs_have_different_marks() -> None:
    assert JobSpec(1, (), Path()).job_id != JobSpec(1, (), Path()).job_id


def test_folders_are_made_and_old_crash_records_removed(tmp_path: Path) -> None:
    (tmp_path / "rank.5").mkdir()
    (tmp_path / "rank.5" / "error.json").touch()
    (tmp_path / "rank.5" / "stdout").touch()
    make_folders(tmp_path, 2)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "rank.0",
        "rank.1",
        "rank.5",
        "rank.5/stdout",
    ]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="The folder for the logs cannot be used"):
        make_folders(tmp_path / "file" / "logs", 1)
