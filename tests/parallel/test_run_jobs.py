"""`tfdistkit ps`, `logs`, `stop` and `stacks`: jobs in other terminals. Other jobs may run on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_process import Job, heed_signals, job, wait_until, write_script

from tfdistkit.cli.jobs import stop
from tfdistkit.launcher.local.watchdog import marked_processes
from tfdistkit.report.hangs.layout import read_notes

# Without TensorFlow: what a rank notes while it trains.
TRAINING = """
import os, sys, time
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import Phase
rank = os.environ["TFDISTKIT_RANK"]
notes.own.enter(Phase.BETWEEN)
step = notes.noting_steps(time.sleep, 1)
for number in range(4):
    step(0.1)
    print(f"step {number} of rank {rank}", flush=True)
print("a warning", file=sys.stderr, flush=True)
def wait():
    while not os.path.exists("end"):
        time.sleep(0.1)
    print("the end", flush=True)
"""


def tfdistkit(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfdistkit", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def listed(pid: int, cwd: Path) -> dict[str, Any] | None:
    """Returns what `ps` tells of the job with a launcher."""
    found = json.loads(tfdistkit("ps", "--json", cwd=cwd).stdout)
    return next((one for one in found if one["pid"] == pid), None)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job of two ranks that have taken 4 steps."""
    folder = tmp_path_factory.mktemp("job")
    script = write_script(folder, TRAINING + "wait()\n")
    with job("-np", "2", "--log-dir", "logs", script, cwd=folder) as running:
        found = [folder / "logs" / f"rank.{rank}" for rank in range(2)]
        wait_until(lambda: all((one / "stderr").exists() and (one / "stderr").stat().st_size for one in found), "steps")
        yield running


def folder_of(running: Job) -> Path:
    return running.stdout_path.parent


def test_ps(running: Job) -> None:
    folder = folder_of(running)
    found = listed(running.process.pid, folder)
    assert found is not None
    assert (found["script"], found["ranks"], found["step"], found["epoch"]) == ("script.py", 2, 4, 1)
    assert found["steps_per_second"] > 0 and found["memory_bytes"] > 1e6 and found["folder"] == str(folder / "logs")
    lines = tfdistkit("ps", cwd=folder).stdout.splitlines()
    assert lines[0].split() == "JOB PID SCRIPT RANKS TIME STATE STEP STEPS/S MEMORY".split()
    row = next(line for line in lines if line.startswith(found["job"]))
    assert "training, epoch 1" in row and row.endswith("GB")
    assert found["job"] in tfdistkit("ps", "-q", cwd=folder).stdout.split()
    argument: Any = next(one for one in stop.make_parser()._actions if one.dest == "job")
    assert found["job"] in argument.completer()  # what the shell offers on TAB


def test_who_only_reads_an_event_log_runs_no_job(running: Job) -> None:
    with (folder_of(running) / "logs" / "events.jsonl").open():
        assert listed(os.getpid(), folder_of(running)) is None


@pytest.mark.parametrize("how", ["pid", "name", "start", "folder"])
def test_logs_of_a_job_by(running: Job, how: str) -> None:
    folder, pid = folder_of(running), running.process.pid
    name = listed(pid, folder)["job"]  # type: ignore[index]
    given = {"pid": str(pid), "name": name, "start": name[:7], "folder": "logs"}[how]
    shown = tfdistkit("logs", given, cwd=folder)
    assert shown.stdout.splitlines() == [
        f"[{rank}] step {number} of rank {rank}" for rank in (0, 1) for number in range(4)
    ]
    assert shown.stderr == "[0] a warning\n[1] a warning\n"
    some = tfdistkit("logs", "-n", "1", "-r", "1", given, cwd=folder)
    assert (some.stdout, some.stderr) == ("[1] step 3 of rank 1\n", "[1] a warning\n")


def test_stacks(running: Job) -> None:
    shown = tfdistkit("stacks", str(running.process.pid), cwd=folder_of(running))
    assert shown.returncode == 0, shown.stderr
    first, *rest = shown.stdout.splitlines()
    assert first == "ranks 0, 1 are in script.py:14 wait: between steps, after training step 4 (epoch 1)"
    assert "rank 1:" in rest and any("script.py" in line and "in wait" in line for line in rest)
    one = tfdistkit("stacks", "-r", "1", "--all-threads", str(running.process.pid), cwd=folder_of(running))
    assert "rank 0" not in one.stdout and "hread 0x" in one.stdout


@pytest.mark.parametrize("command", ["logs", "stop", "stacks"])
def test_no_such_job(running: Job, command: str) -> None:
    ended = tfdistkit(command, "ffffffffff", cwd=folder_of(running))
    assert ended.returncode == 1 and ended.stdout == ""
    assert "JOB must name one job of this user on this machine. Received: 'ffffffffff', and" in ended.stderr


def test_no_such_rank(running: Job) -> None:
    ended = tfdistkit("stacks", "-r", "7", str(running.process.pid), cwd=folder_of(running))
    assert ended.returncode == 1 and "--rank must be a rank of the job. Received: 7. Expected: 0, 1." in ended.stderr


def test_a_job_must_be_named_if_several_run(running: Job, tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\nopen('begun', 'w').close()\ntime.sleep(1000)")
    with job("-np", "1", script, cwd=tmp_path) as other:
        other.wait_for_files(tmp_path / "begun")
        ended = tfdistkit("stop", cwd=tmp_path)
        assert ended.returncode == 1 and "JOB must be given while several jobs run." in ended.stderr
        assert other.process.poll() is None and running.process.poll() is None


def test_logs_are_followed_to_the_end(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINING + "wait()\n")
    with job("-np", "2", "--log-dir", "logs", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "logs" / "rank.1" / "stdout")
        command = [sys.executable, "-m", "tfdistkit", "logs", "-f", str(running.process.pid)]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None and "step 0" in follower.stdout.readline()
            (tmp_path / "end").touch()
            rest = follower.stdout.read()
            assert follower.wait(timeout=60) == 0
        assert "[0] the end" in rest and "[1] the end" in rest
        assert running.end().code == 0
    # Also of a job that has ended, from its folder.
    assert "[1] the end" in tfdistkit("logs", "logs", cwd=tmp_path).stdout
    ended = tfdistkit("stop", "logs", cwd=tmp_path)
    assert ended.returncode == 1 and "JOB must be a running job." in ended.stderr


def test_stop(tmp_path: Path) -> None:
    handler = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
    script = write_script(tmp_path, TRAINING + handler + "open(f'begun.{rank}', 'w').close()\nwait()\n")
    with job("-np", "2", "--log-dir", "logs", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "begun.0", tmp_path / "begun.1")
        stopped = tfdistkit("stop", str(running.process.pid), cwd=tmp_path)
        assert stopped.returncode == 0 and "has ended after" in stopped.stdout, stopped.stderr
        ended = running.end()
        assert ended.code == 143 and "ended by SIGTERM" in ended.stderr and running.left() == []
        assert ended.stdout.count("saved") == 2
        assert listed(running.process.pid, tmp_path) is None


def test_a_job_that_does_not_end_is_killed(tmp_path: Path) -> None:
    ignore = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'begun.{rank}', 'w').close()\nwait()\n"
    )
    script = write_script(tmp_path, TRAINING + ignore)
    with job("-np", "2", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "begun.0", tmp_path / "begun.1")
        stopped = tfdistkit("stop", "--time", "1", str(running.process.pid), cwd=tmp_path)
        assert stopped.returncode == 0 and "has not ended within 1 s of SIGTERM" in stopped.stderr
        assert running.end().code == 143
        wait_until(lambda: running.left() == [], "no process of the job")


def test_a_suspended_launcher_is_killed_and_leaves_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINING + "open(f'begun.{rank}', 'w').close()\nwait()\n")
    with job("-np", "2", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "begun.0", tmp_path / "begun.1")
        os.kill(running.process.pid, signal.SIGSTOP)
        stopped = tfdistkit("stop", "--time", "1", str(running.process.pid), cwd=tmp_path)
        assert stopped.returncode == 0 and "of SIGTERM" in stopped.stderr, stopped.stderr
        wait_until(lambda: running.left() == [], "no process of the job")


LAUNCHING = """
import time
import tfdistkit
def train():
    open("begun", "w").close()
    time.sleep(1000)
if __name__ == "__main__":
    try:
        tfdistkit.launch(train, np=2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    time.sleep(2)
    print("goes on", flush=True)
"""


def test_a_program_that_called_launch_goes_on(tmp_path: Path) -> None:
    script = write_script(tmp_path, LAUNCHING)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TEST_MARK": str(tmp_path)}
    command = [sys.executable, script]
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "preexec_fn": heed_signals}
    with subprocess.Popen(command, text=True, **options) as program:
        try:
            wait_until((tmp_path / "begun").exists, "the function")
            assert listed(program.pid, tmp_path)["script"] == "tfdistkit.launch"  # type: ignore[index]
            assert tfdistkit("stop", str(program.pid), cwd=tmp_path).returncode == 0
            assert program.communicate(timeout=60)[0] == "interrupted\ngoes on\n"
        finally:
            program.kill()
    wait_until(lambda: marked_processes(f"TEST_MARK={tmp_path}") == [], "no process")


def test_after_a_restart_the_last_attempt_is_shown(tmp_path: Path) -> None:
    fails = "if os.environ['TFDISTKIT_ATTEMPT'] == '0':\n    sys.exit(3)\nwait()\n"
    script = write_script(tmp_path, TRAINING + fails)
    with job("-np", "1", "--max-restarts", "1", "--log-dir", "logs", script, cwd=tmp_path) as running:
        again = tmp_path / "logs" / "attempt.1" / "rank.0"
        wait_until(lambda: (read_notes(again) or read_notes(tmp_path)) is not None, "the second attempt")
        wait_until(lambda: bool((again / "stderr").exists() and (again / "stderr").read_text()), "its steps")
        time.sleep(0.1)
        shown = tfdistkit("stacks", str(running.process.pid), cwd=tmp_path)
        assert shown.stdout.startswith("rank 0 is in script.py:14 wait"), shown
        (tmp_path / "end").touch()
        assert running.end().code == 0
