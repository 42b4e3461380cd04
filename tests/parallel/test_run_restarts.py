"""`--max-restarts` for jobs without roles: a failure of one worker restarts all."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from job_process import job, needs_mpirun, run_job, wait_until, write_script

import tfdistkit
from tfdistkit.errors import WorkerFailedError
from tfdistkit.report import read_events

# Attempt 0: an exception. Attempt 1: a kill. Then all goes well.
THIRD_TIME_LUCKY = """
    import os, pathlib, signal, time
    attempt, rank = int(os.environ["TFDISTKIT_ATTEMPT"]), int(os.environ["TFDISTKIT_RANK"])
    print("attempt", attempt, os.environ.get("TF_CONFIG"), flush=True)
    pathlib.Path(f"up.{attempt}.{rank}").touch()
    while not pathlib.Path(f"up.{attempt}.{1 - rank}").exists():
        time.sleep(0.02)
    if attempt == 0 and rank == 1:
        raise ValueError("not yet")
    if attempt == 1 and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt < 2:
        time.sleep(600)
"""


def test_all_workers_restart_until_success(tmp_path: Path) -> None:
    script = write_script(tmp_path, THIRD_TIME_LUCKY)
    ended = run_job("-np", "2", "--max-restarts", "3", "--log-dir", "logs", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "the first failure was\nrank 1 raised ValueError" in ended.stderr
    assert re.search(r"everything starts again as attempt 1 \(restart 1 of 3\) in 1(\.[1-3])? s\.", ended.stderr)
    assert "the first failure was\nrank 0 was killed by SIGKILL" in ended.stderr
    assert re.search(r"everything starts again as attempt 2 \(restart 2 of 3\) in 2(\.[1-5])? s\.", ended.stderr)
    report = ended.stderr[ended.stderr.index("tfdistkit: the job succeeded after") :]
    assert "Earlier: rank 1 raised ValueError after" in report and "Earlier: rank 0 was killed by SIGKILL" in report
    logs = tmp_path / "logs"
    addresses = set()
    for attempt, folder in enumerate((logs, logs / "attempt.1", logs / "attempt.2")):
        output = (folder / "rank.0" / "stdout").read_text()
        assert output.startswith(f"attempt {attempt} ")
        addresses |= set(json.loads(output.split(maxsplit=2)[2])["cluster"]["worker"])
    assert len(addresses) == 6, "each attempt has ports of its own"
    assert (logs / "rank.1" / "error.json").exists() and not (logs / "attempt.1" / "rank.1" / "error.json").exists()
    events = read_events(logs)
    assert [event["attempt"] for event in events if event["event"] == "job_restarting"] == [1, 2]
    assert (events[-1]["outcome"], events[-1]["exit_code"], events[-1]["attempt"]) == ("succeeded", 0, 2)


def test_without_restarts_left_the_last_failure_is_reported(tmp_path: Path) -> None:
    script = "import os, sys\nsys.exit(4 + int(os.environ['TFDISTKIT_ATTEMPT']))"
    ended = run_job("-np", "1", "--max-restarts", "1", write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 5
    report = ended.stderr[ended.stderr.index("tfdistkit: attempt 1, the last one, failed after") :]
    assert "rank 0 ended with exit code 5" in report
    assert "Earlier: rank 0 ended with exit code 4 after" in report
    (run_dir,) = tmp_path.glob("tfdistkit-*")
    assert f"log: {run_dir}/attempt.1/rank.0/stderr" in report


def test_ctrl_c_and_the_timeout_never_restart(tmp_path: Path) -> None:
    script = """
        import os, pathlib, time
        attempt, rank = os.environ["TFDISTKIT_ATTEMPT"], os.environ["TFDISTKIT_RANK"]
        pathlib.Path(f"up.{attempt}.{rank}").touch()
        if attempt == "0":
            1 / 0
        time.sleep(600)
    """
    words = ("-np", "2", "--max-restarts", "5")
    with job(*words, write_script(tmp_path, script), cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "up.1.0", tmp_path / "up.1.1")
        running.process.send_signal(signal.SIGINT)
        ended = running.end()
        assert running.left() == []
    assert ended.code == 130 and "the job was ended by SIGINT" in ended.stderr
    assert "Earlier: rank" in ended.stderr and "attempt 2" not in ended.stderr

    ended = run_job(*words, "--timeout", "5", write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 124 and "everything starts again as attempt 2" not in ended.stderr


def test_ctrl_c_while_a_failed_attempt_is_stopped(tmp_path: Path) -> None:
    script = """
        import os, pathlib, signal, time
        if os.environ["TFDISTKIT_RANK"] == "1":
            while not pathlib.Path("stubborn").exists():
                time.sleep(0.02)
            os._exit(3)
        signal.signal(signal.SIGTERM, lambda number, frame: pathlib.Path("asked").touch())
        pathlib.Path("stubborn").touch()
        while True:
            time.sleep(600)
    """
    with job("-np", "2", "--max-restarts", "5", write_script(tmp_path, script), cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "asked")
        running.process.send_signal(signal.SIGINT)
        ended = running.end()
        assert running.left() == []
    assert ended.code == 130 and "everything starts again" not in ended.stderr


@pytest.mark.parametrize("backend", ["horovod", pytest.param("mpi", marks=needs_mpirun)])
def test_every_backend_restarts(tmp_path: Path, backend: str) -> None:
    script = """
        import os, sys
        from tfdistkit.cluster import detect_cluster
        spec = detect_cluster()
        print(os.environ["TFDISTKIT_ATTEMPT"], spec.rank, spec.world_size, flush=True)
        sys.exit(os.environ["TFDISTKIT_ATTEMPT"] == "0")
    """
    words = ("-np", "2", "--backend", backend, "--max-restarts", "1", "--log-dir", "logs")
    ended = run_job(*words, write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    for rank in (0, 1):
        assert (tmp_path / "logs" / "attempt.1" / f"rank.{rank}" / "stdout").read_text() == f"1 {rank} 2\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tfdistkit")] == []


def test_a_kill_of_the_launcher_ends_a_later_attempt(tmp_path: Path) -> None:
    script = """
        import os, pathlib, subprocess, time
        if os.environ["TFDISTKIT_ATTEMPT"] == "0":
            1 / 0
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        pathlib.Path("up." + os.environ["TFDISTKIT_RANK"]).touch()
        time.sleep(600)
    """
    with job("-np", "2", "--max-restarts", "1", write_script(tmp_path, script), cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "up.0", tmp_path / "up.1")
        running.process.kill()
        running.process.wait(timeout=30)
        wait_until(lambda: running.left() == [], "the end of all processes")


def test_launch_restarts_and_returns_the_last_attempts_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def train() -> tuple[int, str]:
        attempt = os.environ["TFDISTKIT_ATTEMPT"]
        if attempt == "0" and tfdistkit.rank() == 0:
            raise ValueError("not yet")
        return tfdistkit.rank(), attempt

    assert tfdistkit.launch(train, np=2, max_restarts=1) == [(0, "1"), (1, "1")]
    with pytest.raises(WorkerFailedError, match="rank 0 raised ZeroDivisionError.*(\n.*)*Earlier: rank"):
        tfdistkit.launch(lambda: 1 / 0, np=1, max_restarts=1)


def test_launch_returns_the_coordinators_result(tmp_path: Path) -> None:
    def train(word: str) -> tuple[str, int, bool] | None:
        import json
        import socket

        config = json.loads(os.environ["TF_CONFIG"])
        host, port = config["cluster"]["chief"][0].split(":")
        if config["task"]["type"] == "chief":
            listener = socket.create_server((host, int(port)))
            connections = [listener.accept()[0] for _ in range(3)]
            return word, tfdistkit.world_size() + len(connections), tfdistkit.is_chief()
        while True:
            try:
                socket.create_connection((host, int(port))).recv(1)
                os._exit(0)
            except ConnectionRefusedError:
                continue

    assert tfdistkit.launch(train, ("x",), np=2, ps=1, log_dir=tmp_path) == ("x", 5, True)
    assert (tmp_path / "chief.0" / "result.pkl").exists() and not (tmp_path / "ps.0" / "result.pkl").exists()


def test_a_repeated_immediate_failure_is_given_up(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os\nprint(os.environ['TFDISTKIT_ATTEMPT'], flush=True)\nundefined\n")
    ended = run_job("-np", "2", "--max-restarts", "9", "--log-dir", "logs", script, cwd=tmp_path)
    assert ended.code == 1 and {line[4:] for line in ended.stdout.splitlines()} == {"0", "1"}
    assert "tfdistkit: attempt 1 failed like attempt 0: with the same exception, in the same place" in ended.stderr
    assert "It is not restarted (8 restarts are left): fix the script first." in ended.stderr
    assert "tfdistkit: attempt 1, the last one, failed after" in ended.stderr
    (restart,) = [event for event in read_events(tmp_path / "logs") if event["event"] == "job_restarting"]
    assert 1 <= restart["wait_s"] <= 1.25


def test_a_failure_after_the_same_step_is_given_up(tmp_path: Path) -> None:
    script = """
        import sys, types
        module = sys.modules["keras.optimizers"] = types.ModuleType("keras.optimizers")
        class Optimizer:
            class iterations:
                numpy = staticmethod(lambda: 103)
        module.Optimizer = Optimizer
        optimizer = Optimizer()
        raise ValueError("row 4 of the data")
    """
    ended = run_job("-np", "1", "--max-restarts", "9", write_script(tmp_path, script), cwd=tmp_path)
    assert "tfdistkit: attempt 2 failed like attempt 1: with the same exception, in the same place" in ended.stderr
    assert "after step 103, 3 times in a row. It is not restarted (7 restarts are left)" in ended.stderr


def test_transient_failures_are_restarted(tmp_path: Path) -> None:
    script = "import socket\nsocket.create_connection(('127.0.0.1', 1))"
    ended = run_job("-np", "1", "--max-restarts", "2", write_script(tmp_path, script), cwd=tmp_path)
    assert "attempt 2, the last one, failed" in ended.stderr and "raised ConnectionRefusedError" in ended.stderr


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "timeout"])
def test_the_backoff_ends_with_the_job(tmp_path: Path, end: str) -> None:

    words = ["-np", "1", "--max-restarts", "20", "--log-dir", "logs", write_script(tmp_path, "raise OSError")]
    words = ["--timeout", "5", *words] if end == "timeout" else words
    with job(*words, cwd=tmp_path) as running:
        waits = []
        while end != "timeout" and max(waits, default=0) < 2:
            wait_until(lambda: (tmp_path / "logs/events.jsonl").exists(), "the log")
            waits = [event["wait_s"] for event in read_events(tmp_path / "logs") if event["event"] == "job_restarting"]
        if end != "timeout":
            running.process.send_signal(getattr(signal, end))
        ended = running.end()
        assert running.left() == []
    assert ended.code == {"SIGTERM": 143, "SIGINT": 130, "timeout": 124}[end], ended.stderr
    outcome = "did not end within 5 s (--timeout)" if end == "timeout" else f"was ended by {end}"
    assert f"tfdistkit: the job {outcome}" in ended.stderr
