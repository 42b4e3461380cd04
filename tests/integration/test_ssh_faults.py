"""Whoever dies, stops or is cut off: the job ends in time, the first cause is named, nothing is left on any host."""

from __future__ import annotations

import os
import signal
import time

import pytest
from net_hosts import LOGIN, NetHosts
from patience import longer
from ssh_jobs import SshJob, command_line, ssh_job, wait_until

# A worker with a family: a child, a child in a session of its own, and one that ignores what asks it to end.
FAMILY = """
    import os, signal, subprocess, sys, time
    if "stubborn" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["sleep", "601"])
    subprocess.Popen(["sleep", "602"], start_new_session=True)
    print("up at", os.uname().nodename, os.getpid(), flush=True)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("saved", flush=True)
        raise
"""
# After so many seconds of silence a host counts as lost.
SILENCE_S = 10
# What else may take its time on a busy machine.
MORE_S = 12


@pytest.fixture
def two(whole: NetHosts) -> NetHosts:
    """Two hosts with the script, which are mended afterwards."""
    whole.write("train.py", FAMILY)
    return whole


def state_of(pid: int) -> str:
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]


def up(running: SshJob) -> SshJob:
    running.wait_for("[0] up at h1", "[1] up at h2")
    return running


@pytest.mark.parametrize("manners", ["polite", "stubborn"])
def test_ctrl_c_ends_everything_on_all_hosts(two: NetHosts, manners: str) -> None:
    with ssh_job(two, "-H", "h1,h2", "train.py", manners) as running:
        up(running).process.send_signal(signal.SIGINT)
        ended = running.end(deadline_s=25)
        assert ended.code == 130 and "the job was ended by SIGINT" in ended.stderr
        running.nothing_is_left()
        if manners == "polite":
            assert "[0] saved" in ended.stdout and "[1] saved" in ended.stdout


def test_ctrl_c_while_the_hosts_are_checked(two: NetHosts) -> None:
    two.signal_server(2, signal.SIGSTOP)
    try:
        with ssh_job(two, "-H", "h1,h2", "train.py") as running:
            wait_until(lambda: len(two.pids(LOGIN)) >= 3, "ssh")
            running.process.send_signal(signal.SIGINT)
            assert running.end(deadline_s=20).code == 130
            running.nothing_is_left(numbers=(LOGIN, 1))
    finally:
        two.signal_server(2, signal.SIGCONT)
    # What sshd accepted while it was stopped comes to nothing.
    wait_until(lambda: two.pids(2) == [], "the end of sshd's own processes")


@pytest.mark.parametrize("manners", ["polite", "stubborn"])
def test_a_killed_launcher_leaves_nothing(two: NetHosts, manners: str) -> None:
    with ssh_job(two, "-H", "h1,h2,localhost", "train.py", manners) as running:
        up(running).wait_for("[2] up at h0")
        running.process.kill()
        running.process.wait()
        running.nothing_is_left(deadline_s=15)


def test_a_killed_agent_leaves_nothing_either(two: NetHosts) -> None:
    with ssh_job(two, "-H", "h1,h2", "train.py", "stubborn") as running:
        up(running)
        agents = [pid for pid in two.pids(2) if "zlib" in command_line(pid)]
        oldest = min(agents, key=lambda pid: int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19]))
        os.kill(oldest, signal.SIGKILL)
        ended = running.end(deadline_s=25)
        assert ended.code == 255 and "rank 1 was lost with its host h2" in ended.stderr, ended.stderr
        running.nothing_is_left()


def test_a_killed_rank_is_named(two: NetHosts) -> None:
    with ssh_job(two, "-H", "h1,h2", "train.py") as running:
        os.kill(up(running).pid_of(1), signal.SIGKILL)
        ended = running.end(deadline_s=20)
        assert ended.code == 137 and "rank 1 was killed by SIGKILL (host h2, pid " in ended.stderr
        assert "Stopped because of it: rank 0." in ended.stderr
        running.nothing_is_left()


def test_a_stopped_rank_is_named(two: NetHosts) -> None:
    with ssh_job(two, "-H", "h1,h2", "--timeout", "5", "train.py") as running:
        os.kill(up(running).pid_of(1), signal.SIGSTOP)
        ended = running.end(deadline_s=40)
        assert ended.code == 124 and "rank 1 had been suspended (SIGSTOP)" in ended.stderr
        running.nothing_is_left()


def test_a_host_that_goes_off_is_named(two: NetHosts) -> None:
    with ssh_job(two, "-H", "h1:1,h2:2", "train.py") as running:
        up(running).wait_for("[2] up at h2")
        two.kill(2)
        died = time.monotonic()
        ended = running.end(deadline_s=SILENCE_S + MORE_S)
        assert time.monotonic() - died < longer(SILENCE_S + MORE_S)
        assert ended.code == 255 and "rank 1 was lost with its host h2 (host h2, pid " in ended.stderr
        assert "Later, rank 2 was lost with its host h2 too." in ended.stderr and "Stopped because of it: rank 0." in (
            ended.stderr
        )
        running.nothing_is_left(numbers=(LOGIN, 1))


def test_both_sides_of_a_cut_link_end_and_a_suspended_launcher_does_not(two: NetHosts) -> None:
    """At the same time, as both take long: nobody is waited for in silence, but who said Ctrl-Z is."""
    with ssh_job(two, "-H", "h1", "-np", "1", "train.py") as waiting:
        waiting.wait_for("up at h1")
        waiting.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state_of(waiting.process.pid) == "T", "a suspended launcher")
        suspended = time.monotonic()
        workers = two.pids(1)
        with ssh_job(two, "-H", "h1,h2", "train.py") as running:
            up(running)
            two.pull_cable(2)
            cut = time.monotonic()
            ended = running.end(deadline_s=SILENCE_S + MORE_S)
            assert ended.code == 255 and "rank 1 was lost with its host h2" in ended.stderr
            assert f"h2 has not answered for {SILENCE_S} s: it is off, stopped or cut off." in ended.stderr
            wait_until(lambda: set(two.pids(1)) <= set(workers), "h1")
            # The other side hears nothing of the launcher for twice as long; what it started is asked to end.
            running_s = 2 * SILENCE_S + MORE_S - (time.monotonic() - cut)
            wait_until(lambda: not [pid for pid in two.pids(2) if "sshd" not in command_line(pid)], "h2", running_s)
            assert list(two.temporary(2).iterdir()) == []
            time.sleep(max(0.0, suspended + 2 * SILENCE_S + 3 - time.monotonic()))
            assert set(two.pids(1)) == set(workers)
            waiting.process.send_signal(signal.SIGCONT)
            waiting.process.send_signal(signal.SIGINT)
            ended = waiting.end(deadline_s=20)
            assert ended.code == 130 and "saved" in ended.stdout
            waiting.nothing_is_left(numbers=(LOGIN, 1))


def test_only_the_worker_that_floods_is_blocked(two: NetHosts) -> None:
    """Nobody reads the output: the host still answers, and a failure is seen."""
    two.write(
        "train.py",
        """
        import os, pathlib, sys, time
        if os.environ["TFDISTKIT_RANK"] == "1":
            while not pathlib.Path("full").exists():
                time.sleep(0.05)
            os._exit(9)
        for _ in range(3_000):
            print("x" * 10_000)
        raise AssertionError("30 MB went into a pipe that nobody reads")
    """,
    )
    reading, writing = os.pipe()
    try:
        with ssh_job(two, "-H", "h1,h2", "--log-dir", "logs", "train.py", stdout=writing) as running:
            log = two.disk(LOGIN) / "logs" / "rank.0" / "stdout"
            sizes = [-1]

            def is_full() -> bool:
                time.sleep(1)
                sizes.append(log.stat().st_size if log.exists() else -1)
                return sizes[-1] == sizes[-2] > 0

            wait_until(is_full, "a full pipe")
            two.write("full", "", 2)
            ended = running.end(deadline_s=30)
            assert ended.code == 9 and "rank 1 ended with exit code 9 (host h2" in ended.stderr
            running.nothing_is_left()
    finally:
        os.close(reading)
        os.close(writing)
