"""Elastic jobs on real hosts: a lost host is replaced by a spare one, or the job continues without it."""

from __future__ import annotations

import os
import signal

import pytest
from net_hosts import LOGIN, NetHosts
from ssh_jobs import SshJob, ssh_job, wait_until

# Stands in for training: makes a "backup" when it is asked, and trains until the file `enough` is on its host.
TRAIN = """
    import json, os, pathlib, signal, time
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    attempt = os.environ["TFDISTKIT_ATTEMPT"]
    print("up at", os.uname().nodename, os.getpid(), "attempt", attempt, "of", workers, flush=True)
    while not pathlib.Path("enough").exists():
        time.sleep(0.05)
"""
SILENCE_S = 10


@pytest.fixture
def two(whole: NetHosts) -> NetHosts:
    """Two hosts with the script, which are mended afterwards."""
    whole.write("train.py", TRAIN)
    return whole


def wait_for_rank(running: SshJob, rank: int, host: str, attempt: int, workers: int) -> None:
    def is_up() -> bool:
        lines = [line for line in running.stdout.splitlines() if line.endswith(f"attempt {attempt} of {workers}")]
        return any(f"up at {host} " in line and (workers == 1 or line.startswith(f"[{rank}] ")) for line in lines)

    wait_until(is_up, f"rank {rank} on {host}", 240, told=lambda: f"{running.stdout}\n{running.stderr}")


def finish(two: NetHosts, running: SshJob, numbers: tuple[int, ...] = (1, 2)) -> str:
    for number in numbers:
        two.write("enough", "", number)
    ended = running.end(60)
    assert ended.code == 0, ended.stderr
    running.nothing_is_left(numbers=(LOGIN, *numbers))
    return ended.stderr


def test_a_lost_host_leaves_a_smaller_job(two: NetHosts) -> None:
    with ssh_job(two, "-H", "h1:1,h2:1", "-np", "1:2", "train.py") as running:
        wait_for_rank(running, 0, "h1", 0, 2)
        wait_for_rank(running, 1, "h2", 0, 2)
        two.kill(2)
        wait_for_rank(running, 0, "h1", 1, 1)
        stderr = finish(two, running, (1,))
    assert "lost rank 1 after" in stderr and "rank 1 was lost with its host h2" in stderr
    assert "the job continues with 1 worker instead of 2 on h1, from its last backup." in stderr


def test_a_lost_host_is_replaced_by_a_spare_one(two: NetHosts) -> None:
    with ssh_job(two, "-H", "h1:1,h2:1", "-np", "1:1", "train.py") as running:
        wait_for_rank(running, 0, "h1", 0, 1)
        two.kill(1)
        wait_for_rank(running, 0, "h2", 1, 1)
        stderr = finish(two, running, (2,))
    assert "the job continues with 1 worker as before on h2, from its last backup." in stderr


def test_discovered_hosts(two: NetHosts) -> None:
    """One that is not there yet is left out; one that is announced to end is left after a backup."""
    folder = two.disk(LOGIN)
    script, notice = folder / "hosts.sh", folder / "notice"
    script.write_text(f"#!/bin/sh\ncat {folder}/found\n")
    script.chmod(0o755)
    (folder / "found").write_text("h1:1\n")
    options = ("--host-discovery-script", str(script), "--cool-down", "1", "--preemption-file", str(notice))
    with ssh_job(two, "-np", "1:3", *options, "train.py") as running:
        wait_for_rank(running, 0, "h1", 0, 1)
        (folder / "found").write_text("h1:1\nh2:1\nno-such-host:1\n")
        wait_for_rank(running, 1, "h2", 1, 2)
        notice.write_text("h1\n")
        wait_for_rank(running, 0, "h2", 2, 1)
        stderr = finish(two, running, (2,))
        assert two.pids(1) == []
    assert "host no-such-host failed or does not answer: left out for 60 s." in stderr
    assert "the job continues with 2 workers instead of 1 on h1, h2" in stderr
    assert f"preemption notice from {notice}, and there is room for 1 worker" in stderr
    assert "Earlier" not in stderr


def test_a_new_host_on_which_the_script_fails_is_left_out(two: NetHosts) -> None:
    """The job was healthy before it came: it continues without it, although no restart is allowed."""
    folder = two.disk(LOGIN)
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/found\n")
    script.chmod(0o755)
    (folder / "found").write_text("h1:1\n")
    two.write("data.csv", "1", 1)
    two.write("train.py", TRAIN.replace("signal.signal(", 'open("data.csv").close(); signal.signal('))
    with ssh_job(two, "-np", "1:2", "--host-discovery-script", str(script), "--cool-down", "1", "train.py") as running:
        wait_for_rank(running, 0, "h1", 0, 1)
        (folder / "found").write_text("h1:1\nh2:1\n")
        wait_for_rank(running, 0, "h1", 2, 1)
        stderr = finish(two, running)
    assert "rank 1 failed on the new host h2 after" in stderr and "No such file or directory: 'data.csv'" in stderr
    assert "host h2 failed or does not answer: left out for 60 s." in stderr
    assert "the job continues with 1 worker instead of 2 on h1, from its last backup." in stderr


def test_a_killed_worker_and_ctrl_c(two: NetHosts) -> None:
    with ssh_job(two, "-H", "h1:1,h2:1", "-np", "1:2", "train.py") as running:
        wait_for_rank(running, 1, "h2", 0, 2)
        os.kill(running.pid_of(1), signal.SIGKILL)
        wait_for_rank(running, 0, "h1", 1, 1)
        running.process.send_signal(signal.SIGINT)
        assert running.end(60).code == 130
        running.nothing_is_left()
