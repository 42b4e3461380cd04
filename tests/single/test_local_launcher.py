"""Start, signal and stop processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import longer

from tfdistkit.launcher import ProcessSpec
from tfdistkit.launcher.local import watchdog
from tfdistkit.launcher.local.backend import Launcher, LocalProcess
from tfdistkit.report import ProcessName
from tfdistkit.supervise.stopping import GRACE_S, stop_workers

JOB_ID = f"test-{os.getpid()}"


@pytest.fixture
def place() -> Iterator[Launcher]:
    launcher = Launcher(JOB_ID)
    yield launcher
    launcher.close()
    assert watchdog.marked_processes(f"TFDISTKIT_JOB_ID={JOB_ID}") == []


def start(place: Launcher, shell: str) -> LocalProcess:
    return place.start(ProcessSpec(ProcessName(0), "here", ("sh", "-c", shell), {}, Path()))


def wait_for(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("shell", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -15 $$", -15)])
def test_exit_codes(place: Launcher, shell: str, code: int) -> None:
    process = start(place, shell)
    place.wait(20)
    wait_for(lambda: process.exit_code() is not None)
    assert process.exit_code() == code and process.is_gone()


def test_wait_returns_at_an_end_or_the_timeout(place: Launcher) -> None:
    slow = start(place, "sleep 600")
    started = time.monotonic()
    place.wait(0.2)
    assert time.monotonic() - started < longer(20) and slow.exit_code() is None
    quick = start(place, "sleep 0.2")
    place.wait(60)
    wait_for(lambda: quick.exit_code() == 0)
    assert time.monotonic() - started < longer(40)


def test_wait_polls_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    place = Launcher(JOB_ID)
    try:
        quick = start(place, "sleep 0.2; exit 3")
        deadline = time.monotonic() + 20
        while quick.exit_code() is None and time.monotonic() < deadline:
            place.wait(10)
        assert quick.exit_code() == 3
    finally:
        place.close()


def test_a_worker_is_gone_only_with_its_children(place: Launcher) -> None:
    process = start(place, "sleep 600 & exit 0")
    wait_for(lambda: process.exit_code() == 0)
    assert not process.is_gone()
    process.send_signal(signal.SIGTERM)
    wait_for(process.is_gone)


def test_its_process_id_is_not_reused_before_close(place: Launcher) -> None:
    process = start(place, "exit 0")
    wait_for(lambda: process.exit_code() == 0)
    assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z"
    place.close()
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_suspended_process_is_detected_and_stopped(place: Launcher) -> None:
    process = start(place, "sleep 600")
    assert not process.is_suspended()
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(process.is_suspended)
    started = time.monotonic()
    stop_workers([process], signal.SIGTERM)
    assert process.exit_code() == -signal.SIGTERM and time.monotonic() - started < longer(GRACE_S)


def test_a_process_that_ignores_sigterm_is_killed_after_the_deadline(place: Launcher) -> None:
    process = start(place, "trap '' TERM; echo up; while true; do sleep 1; done")
    assert os.read(process.stdout.fileno(), 3) == b"up\n"
    stop_workers([process], signal.SIGTERM)
    wait_for(process.is_gone)
    assert process.exit_code() == -signal.SIGKILL


def test_should_stop_skips_the_deadline(place: Launcher) -> None:
    process = start(place, "trap '' TERM; echo up; while true; do sleep 1; done")
    assert os.read(process.stdout.fileno(), 3) == b"up\n"
    started = time.monotonic()
    stop_workers([process], signal.SIGTERM, should_stop=lambda: True)
    wait_for(process.is_gone)
    assert time.monotonic() - started < longer(GRACE_S)


def test_close_kills_processes_that_left_the_group(place: Launcher) -> None:
    # `exec`: a shell whose child is killed first would leave with code 137 by itself.
    process = start(place, "setsid sleep 600 & exec 1>&- 2>&-; exec sleep 600")
    wait_for(lambda: len(watchdog.marked_processes(f"TFDISTKIT_JOB_ID={JOB_ID}")) == 2)
    place.close()
    assert process.exit_code() == -signal.SIGKILL
    assert watchdog.marked_processes(f"TFDISTKIT_JOB_ID={JOB_ID}") == []


def test_a_missing_command_raises(place: Launcher) -> None:
    with pytest.raises(FileNotFoundError):
        place.start(ProcessSpec(ProcessName(0), "here", ("/no/such/program",), {}, Path()))


def test_the_watchdog_forgets_groups_that_are_gone() -> None:
    """A process id can be reused; the watchdog must not kill the new process."""
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        command = [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid()), "TEST_NOBODY=has this"]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE)
        guard.communicate(f"+{stranger.pid}\n+{victim.pid}\n-{stranger.pid}\n".encode(), timeout=20)
        assert victim.wait(timeout=20) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for process in (stranger, victim):
            process.kill()
            process.wait()
