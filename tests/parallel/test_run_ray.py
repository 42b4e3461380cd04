"""`tfdistkit run --backend ray` with a real Ray: the same job as elsewhere, and none of its processes left."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from equal_training import check_equal, read_results, train_alone, write_training
from job_process import Ended, Job, job, wait_until, write_script
from ray_cluster import VARIABLES, RayCluster, ray_cluster

from tfdistkit.launcher.local.watchdog import process_state

# It comes with the extra `test`: it is missing only where somebody chose so.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and os.environ.get("TFDISTKIT_REQUIRE_HOSTS") != "1",
    reason="Ray is not tested: it is not installed (pip install ray)",
)

# Far above what is measured: 4 s for a job on the cluster, 10 s with a cluster of its own.
DEADLINE_S = 120.0

WAIT = """
    import os, time
    os.write(1, f"up {os.environ['TFDISTKIT_RANK']} {os.getpid()}\\n".encode())
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A cluster of two nodes with a CPU each."""
    with ray_cluster(tmp_path_factory.mktemp("ray")) as running:
        yield running


def start(address: str, folder: Path, *words: str) -> Any:
    return job("--backend", "ray", "--ray-address", address, *words, cwd=folder, **VARIABLES)


def run(address: str, folder: Path, *words: str) -> Ended:
    with start(address, folder, *words) as running:
        ended: Ended = running.end(DEADLINE_S)
        assert running.left() == []
        return ended


def pids_of(running: Job) -> dict[str, int]:
    """Waits until both workers are up, and returns their process ids."""
    pattern = re.compile(r"up (\d) (\d+)$", re.MULTILINE)

    def is_up() -> bool:
        assert running.process.poll() is None, running.stderr_path.read_text()
        return len(pattern.findall(running.stdout)) == 2

    wait_until(is_up, "two workers", DEADLINE_S)
    return {rank: int(pid) for rank, pid in pattern.findall(running.stdout)}


def actor_of(pid: int) -> psutil.Process:
    """Returns the actor of a worker, which is the parent of its agent."""
    actor = psutil.Process(pid).parents()[1]
    assert "AgentActor" in " ".join(actor.cmdline()), actor
    return actor


def alive(pids: Iterable[int]) -> list[int]:
    """Returns which processes are alive; init may take its time to reap those that have ended."""
    return [pid for pid in pids if process_state(pid) not in ("", "Z", "X")]


@pytest.mark.tensorflow
def test_the_training_of_one_process(cluster: RayCluster, tmp_path: Path) -> None:
    ended = run(cluster.address, tmp_path, "-np", "2", write_training(tmp_path), "multiworker")
    assert ended.code == 0, ended.stderr
    check_equal(read_results(ended.stdout), train_alone(tmp_path), [os.uname().nodename] * 2, "MultiWorkerStrategy")


def test_a_hang_is_explained_and_stopped(cluster: RayCluster, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import time
        from tfdistkit.report.hangs import notes
        from tfdistkit.report.hangs.layout import Phase
        notes.own.enter(Phase.SETUP)

        def looks_for_a_file():
            time.sleep(600)

        notes.noting_steps(lambda function: function(), 1)(looks_for_a_file)
        """,
    )
    ended = run(cluster.address, tmp_path, "-np", "2", "--hang-timeout", "6", script)
    assert ended.code == 1
    assert "the job hung, and was stopped after" in ended.stderr
    assert re.search(r"ranks 0, 1 wait, .* in script.py:\d+ looks_for_a_file: training step 1", ended.stderr)


def test_a_failure_and_a_restart(cluster: RayCluster, tmp_path: Path) -> None:
    """The variables, the folder and the arguments are the user's, and the second attempt runs on the same cluster."""
    script = write_script(
        tmp_path,
        """
        import json, os, sys, tfdistkit, time
        attempt = int(os.environ["TFDISTKIT_ATTEMPT"])
        told = [attempt, tfdistkit.rank(), tfdistkit.world_size(), tfdistkit.local_rank(), sys.argv[1:], os.getcwd()]
        told += [os.environ["NAME"], os.environ.get("PYTHONBREAKPOINT"), os.environ["TF_NUM_INTRAOP_THREADS"]]
        told.append(os.environ["CUDA_VISIBLE_DEVICES"])
        os.write(1, (json.dumps(told) + chr(10)).encode())
        if tfdistkit.rank() == 1:
            deadline = time.monotonic() + 100
            while not os.path.exists(f"told.{attempt}"):  # Rank 0 would be stopped before it has told.
                assert time.monotonic() < deadline
                time.sleep(0.05)
            raise OSError("the disk is away") if not attempt else SystemExit(7)
        open(f"told.{attempt}", "w").close()
        time.sleep(600)
        """,
    )
    words = ("-np", "2", "--gpus-per-worker", "1", "--max-restarts", "1", "--env", "NAME=value")
    ended = run(cluster.address, tmp_path, *words, script, "--epochs", "3")
    assert ended.code == 7, ended.stderr
    for rank in (0, 1):
        told = [json.loads(line[4:]) for line in ended.stdout.splitlines() if line.startswith(f"[{rank}] [")]
        own = [rank, 2, rank, ["--epochs", "3"], str(tmp_path), "value", None, "1", "0"]
        assert told == [[0, *own], [1, *own]]
    assert "rank 1 raised OSError" in ended.stderr and "OSError: the disk is away" in ended.stderr
    assert "rank 1 ended with exit code 7" in ended.stderr and "Stopped because of it: rank 0" in ended.stderr


def test_ctrl_c_ends_a_cluster_of_its_own(tmp_path: Path) -> None:
    script = write_script(tmp_path, WAIT)
    with start("local", tmp_path, "-np", "2", "--cpus-per-worker", "0.5", script) as running:
        pids = pids_of(running)
        raylet = actor_of(pids["0"]).parent()
        assert raylet is not None and raylet.pid in running.left()
        running.process.send_signal(signal.SIGINT)
        ended = running.end(DEADLINE_S)
        assert ended.code == 130 and "KeyboardInterrupt" in ended.stderr, ended.stderr
        assert running.left() == [] and alive([*pids.values(), raylet.pid]) == []


def test_too_few_cpus(cluster: RayCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path, WAIT)
    ended = run(cluster.address, tmp_path, "-np", "3", "--start-timeout", "2", script)
    assert ended.code == 2 and ended.seconds < DEADLINE_S / 2
    assert "3 CPUs for the workers; the cluster has 2 CPUs, free: 2 CPUs" in ended.stderr, ended.stderr


def test_an_address_without_a_cluster(tmp_path: Path) -> None:
    ended = run("127.0.0.1:9", tmp_path, "-np", "2", write_script(tmp_path, WAIT))
    assert ended.code == 2 and "127.0.0.1:9: [Errno 111]" in ended.stderr, ended.stderr


def test_an_actor_that_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    with start(cluster.address, tmp_path, "-np", "2", write_script(tmp_path, WAIT)) as running:
        pids = pids_of(running)
        actor_of(pids["1"]).kill()
        ended = running.end(DEADLINE_S)
        assert ended.code == 255, ended.stderr
        assert "rank 1 was lost with its Ray actor on" in ended.stderr and "The actor died: " in ended.stderr
        assert alive(pids.values()) == []


def test_a_launcher_that_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    with start(cluster.address, tmp_path, "-np", "2", write_script(tmp_path, WAIT)) as running:
        pids = pids_of(running)
        running.process.kill()
        wait_until(lambda: not alive(pids.values()) and not running.left(), "the end of all")


def test_a_node_that_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    """The last one here: the node does not come back."""
    with start(cluster.address, tmp_path, "-np", "2", write_script(tmp_path, WAIT)) as running:
        pids = pids_of(running)
        raylets = {rank: actor_of(pid).ppid() for rank, pid in pids.items()}
        assert len(set(raylets.values())) == 2
        cluster.kill_node()
        ended = running.end(DEADLINE_S)
        (lost,) = (rank for rank, raylet in raylets.items() if not alive([raylet]))
        assert ended.code == 255 and f"rank {lost} was lost with its Ray actor on" in ended.stderr, ended.stderr
        assert alive(pids.values()) == []
