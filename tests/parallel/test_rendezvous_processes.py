"""The rendezvous before training between real processes, some of them killed, stopped or restarted."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdistkit import env
from tfdistkit.cluster import ClusterSpec, TaskSpec, free_ports, to_tf_config

LONG_S = 60.0
SHORT_S = 6.0

# A training process: runs the rendezvous, then starts a server at its own address at once, as TensorFlow does.
SCRIPT = """
import json, sys
from tfdistkit import cluster
from tfdistkit.cluster import ports
spec = cluster.detect_cluster()
cluster.check_own_address(spec)
print("here", file=sys.stderr, flush=True)
try:
    rendezvous = cluster.exchange_facts(spec, {"rank": spec.rank, "tensorflow": "2.21.0"}, float(sys.argv[1]))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
else:
    for held in ports.bind("", cluster.split_address(spec.address)[1]):
        held.listen()
    print(json.dumps({"facts": rendezvous.facts}), flush=True)
"""


class Job:
    def __init__(self, size: int):
        self.addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(size))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int, timeout_s: float = LONG_S) -> subprocess.Popen[str]:
        spec = ClusterSpec({"worker": self.addresses}, TaskSpec("worker", rank))
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(timeout_s)],
            env=env.child_env({env.TF_CONFIG: to_tf_config(spec), "PYTHONPATH": str(Path(__file__).parents[2])}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stderr is not None
        assert select.select([process.stderr], [], [], LONG_S)[0], "the process says nothing"
        assert process.stderr.readline() == "here\n"
        return process


@pytest.fixture
def processes() -> Iterator[list[Job]]:
    """Returns the list of a test's jobs, and kills their processes after it."""
    jobs: list[Job] = []
    yield jobs
    for process in [process for job in jobs for process in job.processes]:
        process.kill()
        process.communicate()


def outcome(process: subprocess.Popen[str]) -> dict[str, object]:
    output, _ = process.communicate(timeout=LONG_S + 30)
    result = json.loads(output)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_join_and_start_their_servers(processes: list[Job], size: int) -> None:
    job = Job(size)
    processes.append(job)
    for rank in reversed(range(size)):
        job.start(rank)
    for process in job.processes:
        assert outcome(process) == {"facts": [{"rank": rank, "tensorflow": "2.21.0"} for rank in range(size)]}


def test_a_stopped_rank_is_named(processes: list[Job]) -> None:
    job = Job(3)
    processes.append(job)
    stopped = job.start(1, SHORT_S)
    os.kill(stopped.pid, signal.SIGSTOP)
    others = [job.start(0, SHORT_S), job.start(2, SHORT_S)]
    for process in others:
        result = outcome(process)
        assert result["error"] == "RendezvousError"
        # It was stopped before or after its hello.
        assert f"rank 1 ({job.addresses[1]})" in str(result["message"])
    os.kill(stopped.pid, signal.SIGCONT)
    assert outcome(stopped)["error"] == "RendezvousError"


def test_a_stopped_rank_that_continues_can_join(processes: list[Job]) -> None:
    job = Job(2)
    processes.append(job)
    stopped = job.start(1)
    os.kill(stopped.pid, signal.SIGSTOP)
    first = job.start(0)
    time.sleep(1.0)
    os.kill(stopped.pid, signal.SIGCONT)
    for process in (first, stopped):
        assert "facts" in outcome(process)


def test_a_stopped_rank_0_is_named(processes: list[Job]) -> None:
    job = Job(2)
    processes.append(job)
    first = job.start(0, LONG_S)
    time.sleep(0.5)
    os.kill(first.pid, signal.SIGSTOP)
    result = outcome(job.start(1, SHORT_S))
    assert result["error"] == "RendezvousError"
    assert f"Rank 0 at {job.addresses[0]}" in str(result["message"])
    assert "is it stopped?" in str(result["message"])


def test_a_killed_rank_is_missing(processes: list[Job]) -> None:
    job = Job(3)
    processes.append(job)
    first = job.start(0, SHORT_S)
    killed = job.start(1, SHORT_S)
    time.sleep(0.5)
    killed.kill()
    result = outcome(first)
    assert result["error"] == "RendezvousError"
    assert f"rank 1 ({job.addresses[1]}), rank 2 ({job.addresses[2]}) did not join" in str(result["message"])


def test_rank_0_killed_and_restarted(processes: list[Job]) -> None:
    job = Job(2)
    processes.append(job)
    killed = job.start(0)
    time.sleep(0.5)
    second = job.start(1)
    os.kill(second.pid, signal.SIGSTOP)  # so that the rendezvous does not complete before rank 0 is killed
    killed.kill()
    killed.wait(LONG_S)
    again = job.start(0)
    os.kill(second.pid, signal.SIGCONT)
    results = [outcome(second), outcome(again)]
    assert all("facts" in result for result in results), results
