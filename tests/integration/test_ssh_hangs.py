"""Jobs on other hosts that hang: explained on one screen and stopped, as on this machine; slow ones are left alone."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_hosts import NetHosts
from ssh_jobs import PATHS, ssh_job, wait_until

from tfdistkit.report.events import read_events

# Without TensorFlow: what a rank notes while it trains.
TRAIN = """
    import os, sys, time, types
    from tfdistkit.report.hangs import notes
    from tfdistkit.report.hangs.layout import Phase
    rank, attempt = int(os.environ["TFDISTKIT_RANK"]), int(os.environ["TFDISTKIT_ATTEMPT"])
    step = notes.noting_steps(lambda function: function(), 1)
    notes.own.enter(Phase.SETUP)
    step(lambda: None)
    print("up at", os.uname().nodename, os.getpid(), flush=True)

    def compute(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end: pass

    if sys.argv[1] == "slow":
        if rank == 1:
            compute(9)
            for _ in range(4):
                step(lambda: time.sleep(2))
        sys.exit()
    if sys.argv[1] == "uneven":
        for number in range(30):
            if rank == 1:
                time.sleep(0.4)
            notes.own.note_ring(number + 1, number)
            if rank == 0:
                time.sleep(0.4)
            notes.own.note_ring(number + 1, number + 1)
            step(lambda: None)
        sys.exit()
    if sys.argv[1] == "waits" and rank == 0:
        module = sys.modules["tensorflow.python.framework.errors_impl"] = types.ModuleType("errors_impl")
        exec("class OpError(Exception): pass", {"__name__": "tensorflow.python.framework.errors_impl"}, vars(module))
        time.sleep(5)
        raise module.OpError("Collective has timed out")
    if sys.argv[1] == "restarts" and attempt > 0:
        sys.exit()

    def looks_for_a_file():
        time.sleep(1000)

    step(looks_for_a_file)
"""


@pytest.fixture
def two(hosts: NetHosts) -> Iterator[NetHosts]:
    """Two hosts with the script."""
    hosts.clean()
    hosts.write("train.py", TRAIN)
    yield hosts
    hosts.clean()


def words(*options: str, script: str) -> tuple[str, ...]:
    return ("-H", "h1:1,h2:1", "--log-dir", "logs", *options, "train.py", script)


def logs_of(two: NetHosts) -> Path:
    return two.disk(0) / "logs"


def test_a_hang_is_explained_and_stopped(two: NetHosts) -> None:
    with ssh_job(two, *words("--hang-timeout", "8", script="hangs")) as running:
        running.wait_for("[0] up at h1", "[1] up at h2")
        launcher = str(running.process.pid)

        def shown(command: str, *more: str) -> str:
            """Returns what another terminal on the machine of the launcher shows."""
            variables = {**os.environ, "PYTHONPATH": PATHS}
            return two.login(sys.executable, "-m", "tfdistkit", command, *more, env=variables).stdout

        def is_training() -> bool:
            return any(launcher in line and " training, epoch 1 " in line for line in shown("ps").splitlines())

        wait_until(is_training, "the progress of ranks on other hosts", 30)
        stacks = shown("stacks", launcher)
        assert re.search(r"^ranks 0, 1 .* in train.py:\d+ looks_for_a_file: training step 2", stacks), stacks
        assert "rank 1:\n" in stacks and stacks.count("looks_for_a_file") == 3
        os.kill(running.pid_of(1), signal.SIGSTOP)
        ended = running.end(60)
        running.nothing_is_left()
    assert ended.code == 1
    report = ended.stderr.partition("tfdistkit: the job hung, and was stopped after ")[2].splitlines()
    assert report[0].endswith("no rank made progress for 8 s."), ended.stderr
    assert re.match(r"rank 0 waits, probably for data, in train.py:\d+ looks_for_a_file: training step 2", report[1])
    spied = r"in train.py:\d+ looks_for_a_file: training step 2 \(epoch 1\) \(stack read by py-spy\)"
    assert re.fullmatch(rf"rank 1 is suspended \(SIGSTOP\) {spied}", report[2])


def test_slow_jobs_are_left_alone(two: NetHosts) -> None:
    with ssh_job(two, *words("--hang-timeout", "5", script="slow")) as running:
        ended = running.end(90)
        assert ended.code == 0, ended.stderr
        running.nothing_is_left()


def test_a_hang_is_answered_by_a_restart(two: NetHosts) -> None:
    with ssh_job(two, *words("--hang-timeout", "5", "--max-restarts", "1", script="restarts")) as running:
        ended = running.end(90)
        assert ended.code == 0, ended.stderr
        running.nothing_is_left()
    assert "attempt 0 hung after" in ended.stderr and "as attempt 1 (restart 1 of 1)" in ended.stderr


def test_a_timeout_of_a_collective_tells_where_the_peers_are(two: NetHosts) -> None:
    with ssh_job(two, *words(script="waits")) as running:
        ended = running.end(90)
        running.nothing_is_left()
    reported = ended.stderr.partition("the first failure was\n")[2]
    assert reported.startswith("rank 0 raised OpError"), ended.stderr
    assert re.search(r"Meanwhile rank 1 .* in train.py:\d+ looks_for_a_file", reported), ended.stderr
    assert [event["event"] for event in read_events(logs_of(two))].count("hang") == 1


def test_the_slowest_rank_is_named(two: NetHosts) -> None:
    with ssh_job(two, *words(script="uneven")) as running:
        ended = running.end(90)
        running.nothing_is_left()
    assert ended.code == 0, ended.stderr
    assert "tfdistkit: rank 1 was the slowest: the others waited for it in " in ended.stderr
    event = next(one for one in read_events(logs_of(two)) if one["event"] == "straggler")
    assert event["process"] == "rank 1" and list(event["phases"]) == ["callbacks"]
