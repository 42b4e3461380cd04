"""No process outlives its job: signals, timeouts, a killed worker, a killed launcher, grandchildren."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_process import Job, job, wait_until, write_script

from tfdistkit.supervise.stopping import GRACE_S

# A worker with a family: a child, a child in a session of its own, a child without our variables (it writes its pid,
# since no mark finds it); a stubborn one also a shell that ignores
# what asks it to end, with a child that does too.
FAMILY = """
    import os, pathlib, signal, subprocess, sys, time
    rank = os.environ["TFDISTKIT_RANK"]
    if "stubborn" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        subprocess.Popen(["sh", "-c", "trap '' INT TERM HUP USR1; sleep 604 & wait"])
    subprocess.Popen(["sleep", "601"])
    subprocess.Popen(["sleep", "602"], start_new_session=True)
    bare = subprocess.Popen(["env", "-i", "sleep", "603"])
    pathlib.Path(f"bare.{rank}").write_text(str(bare.pid))
    pathlib.Path(f"worker.{rank}").write_text(str(os.getpid()))
    pathlib.Path(f"up.{rank}").touch()
    time.sleep(600)
"""


@contextlib.contextmanager
def family(folder: Path, *arguments: str, options: tuple[str, ...] = (), script: str | None = None) -> Iterator[Job]:
    """A job of two workers with their families, all up; afterwards none of them is there, whatever failed."""
    try:
        with job("-np", "2", *options, script or write_script(folder, FAMILY), *arguments, cwd=folder) as running:
            running.wait_for_files(folder / "up.0", folder / "up.1")
            yield running
    finally:
        for path in folder.glob("bare.*"):
            if is_sleep(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


def assert_nothing_left(running: Job, folder: Path) -> None:
    wait_until(lambda: running.left() == [], "the end of all marked processes", deadline_s=5)
    for rank in (0, 1):
        pid = int((folder / f"bare.{rank}").read_text())
        wait_until(lambda pid=pid: not is_sleep(pid), "the end of the child without variables", deadline_s=5)


def is_sleep(pid: int) -> bool:
    try:
        return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1"])
@pytest.mark.parametrize("manners", ["polite", "stubborn"])
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, name: str, manners: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    with family(tmp_path, manners) as running:
        running.process.send_signal(number)
        if manners == "stubborn" and name in ("TERM", "USR1"):
            # They are given long, for a last backup; whoever cannot wait says it once more.
            wait_until(lambda: "stopping the workers" in running.stderr_path.read_text(), "the launcher's answer")
            running.process.send_signal(number)
        ended = running.end(deadline_s=9)
        assert ended.code == 128 + number
        assert f"the job was ended by {number.name}" in ended.stderr
        assert_nothing_left(running, tmp_path)


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with family(tmp_path, "stubborn") as running:
        running.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping the workers" in running.stderr_path.read_text(), "the launcher's answer")
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGINT)
        # Less than what the workers would be given to end by themselves.
        assert running.end(deadline_s=4).code == 130
        assert_nothing_left(running, tmp_path)


def test_a_scheduler_signal_leaves_time_for_a_last_backup(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        f"""
        import os, pathlib, signal, sys, time
        def save(number, frame):
            time.sleep({GRACE_S + 2})
            print("saved", flush=True)
            sys.exit(128 + number)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("up." + os.environ["TFDISTKIT_RANK"]).touch()
        time.sleep(600)
        """,
    )
    with job("-np", "2", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "up.0", tmp_path / "up.1")
        running.process.send_signal(signal.SIGTERM)
        ended = running.end()
        assert running.left() == []
    assert ended.code == 143 and sorted(ended.stdout.splitlines()) == ["[0] saved", "[1] saved"]


def test_workers_receive_the_same_signal(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        try:
            pathlib.Path("up." + os.environ["TFDISTKIT_RANK"]).touch()
            time.sleep(600)
        except KeyboardInterrupt:
            print("saved", flush=True)
        """,
    )
    with job("-np", "2", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "up.0", tmp_path / "up.1")
        running.process.send_signal(signal.SIGINT)
        ended = running.end()
    assert ended.code == 130
    assert sorted(ended.stdout.splitlines()) == ["[0] saved", "[1] saved"]


@pytest.mark.parametrize("manners", ["polite", "stubborn"])
def test_kill_of_the_launcher_ends_everything(tmp_path: Path, manners: str) -> None:
    with family(tmp_path, manners) as running:
        running.process.kill()
        running.process.wait(timeout=5)
        assert_nothing_left(running, tmp_path)


def test_kill_of_launcher_and_watchdog_still_ends_the_workers(tmp_path: Path) -> None:
    with family(tmp_path, "stubborn") as running:
        workers = [int((tmp_path / f"worker.{rank}").read_text()) for rank in (0, 1)]
        (watchdog,) = (pid for pid in running.left() if b"watchdog.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(watchdog, signal.SIGKILL)
        running.process.kill()
        wait_until(lambda: not set(workers) & set(running.left()), "the end of the workers", deadline_s=5)


def test_kill_of_an_outer_launcher_ends_the_inner_job(tmp_path: Path) -> None:
    inner = write_script(tmp_path, FAMILY, name="inner.py")
    outer = write_script(
        tmp_path,
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'tfdistkit', 'run', '-np', '2', {inner!r}])",
    )
    with family(tmp_path, script=outer) as running:
        running.process.kill()
        assert_nothing_left(running, tmp_path)


@pytest.mark.parametrize("manners", ["polite", "stubborn"])
def test_a_killed_worker_stops_the_others_and_is_named(tmp_path: Path, manners: str) -> None:
    with family(tmp_path, manners) as running:
        victim = int((tmp_path / "worker.1").read_text())
        os.kill(victim, signal.SIGKILL)
        ended = running.end(deadline_s=10)
        assert ended.code == 137
        assert f"rank 1 was killed by SIGKILL (host {os.uname().nodename}, pid {victim}, exit code 137)" in ended.stderr
        assert_nothing_left(running, tmp_path)


def test_a_worker_that_hangs_after_its_exception_stops_the_others(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import atexit, os, time
        if os.environ["TFDISTKIT_RANK"] == "1":
            atexit.register(time.sleep, 600)
            raise ValueError("and then it hangs")
        time.sleep(600)
        """,
    )
    with job("-np", "2", script, cwd=tmp_path) as running:
        ended = running.end(deadline_s=15)
        assert ended.code == 1
        assert "rank 1 raised ValueError" in ended.stderr
        assert running.left() == []


def test_the_timeout_ends_everything_and_a_suspended_worker_is_named(tmp_path: Path) -> None:
    with family(tmp_path, "polite", options=("--timeout", "4")) as running:
        os.kill(int((tmp_path / "worker.1").read_text()), signal.SIGSTOP)
        ended = running.end(deadline_s=20)
        assert ended.code == 124
        assert "the job did not end within 4 s (--timeout)" in ended.stderr
        assert "rank 1 had been suspended (SIGSTOP)" in ended.stderr
        assert_nothing_left(running, tmp_path)


def test_a_suspended_worker_is_ended_too(tmp_path: Path) -> None:
    with family(tmp_path, "stubborn") as running:
        for rank in (0, 1):
            os.kill(int((tmp_path / f"worker.{rank}").read_text()), signal.SIGSTOP)
        running.process.send_signal(signal.SIGHUP)
        assert running.end(deadline_s=15).code == 129
        assert_nothing_left(running, tmp_path)


def test_children_that_outlive_a_successful_script_are_ended(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import subprocess
        subprocess.Popen(["sleep", "601"])
        subprocess.Popen(["sleep", "602"], start_new_session=True)
        """,
    )
    with job("-np", "2", script, cwd=tmp_path) as running:
        assert running.end(deadline_s=15).code == 0
        assert running.left() == []


def test_a_blocked_reader_does_not_stop_supervision(tmp_path: Path) -> None:
    """The output goes into a pipe without a reader: a dead worker is detected nevertheless."""
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        if os.environ["TFDISTKIT_RANK"] == "1":
            while not pathlib.Path("full").exists():
                time.sleep(0.01)
            os._exit(9)
        pathlib.Path("full").touch()
        while True:
            print("x" * 1000)
        """,
    )
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--log-dir", "logs", script],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    try:
        assert b"rank 1 ended with exit code 9" in process.communicate(timeout=30)[1]
        assert process.returncode == 9
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)


def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under `nohup`: the closed terminal ends nothing."""
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        pathlib.Path("up." + os.environ["TFDISTKIT_RANK"]).touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.02)
        """,
    )
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "tfdistkit", "run", "-np", "2", script],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: (tmp_path / "up.0").exists() and (tmp_path / "up.1").exists(), "the workers")
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
