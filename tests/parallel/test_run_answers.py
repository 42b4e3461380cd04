"""The launcher responds whatever happens to its output: a stalled reader, a full disk, closed descriptors."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_process import heed_signals, wait_until, write_script
from patience import longer

from tfdistkit.launcher.local.watchdog import marked_processes
from tfdistkit.report.events import read_events

# What the launcher may take besides the 5 seconds in which it asks workers to end.
_ANSWER_S = 5.0
_GRACE_S = 5.0

PRINTS = """
import os, pathlib, sys, time
rank = os.environ["TFDISTKIT_RANK"]
if rank == "1":
    while not pathlib.Path("fail").exists():
        time.sleep(0.01)
    os._exit(9)
pathlib.Path("up").touch()
while True:
    print("x" * 1000, file=sys.stderr)
    print("x" * 1000)
"""


class Stuck:
    """A job whose output has no reader: a pipe, or a terminal."""

    def __init__(self, folder: Path, words: list[str], is_terminal: bool):
        self.ours, theirs = pty.openpty() if is_terminal else os.pipe()
        os.set_blocking(theirs, True)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--log-dir", "logs", *words],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "STUCK": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=heed_signals,  # noqa: PLW1509
        )
        os.close(theirs)

    def wait_until_stuck(self) -> None:
        """Waits until the log does not grow any more, because the worker waits when it prints."""
        log, sizes = self.folder / "logs/rank.0/stdout", [0, -1, -2]

        def stands() -> bool:
            time.sleep(0.3)
            sizes[:] = [*sizes[1:], log.stat().st_size if log.exists() else 0]
            return sizes[0] == sizes[2] > 10_000

        wait_until(stands, "the output stands still")

    def left(self) -> list[int]:
        return [pid for pid in marked_processes(f"STUCK={self.folder}") if pid != self.process.pid]


@contextlib.contextmanager
def stuck(folder: Path, *words: str, is_terminal: bool = False) -> Iterator[Stuck]:
    job = Stuck(folder, [*words, write_script(folder, PRINTS)], is_terminal)
    try:
        job.wait_until_stuck()
        yield job
    finally:
        job.process.kill()
        job.process.wait(timeout=60)
        for pid in job.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(job.ours)


BOTH = pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])


@BOTH
def test_a_failed_rank_ends_a_job_with_a_stalled_reader(tmp_path: Path, is_terminal: bool) -> None:
    with stuck(tmp_path, is_terminal=is_terminal) as job:
        begin = time.monotonic()
        (tmp_path / "fail").touch()
        assert job.process.wait(timeout=60) == 9
        assert time.monotonic() - begin < longer(_GRACE_S + _ANSWER_S)
        assert job.left() == []
        assert read_events(tmp_path / "logs")[-1]["exit_code"] == 9


@BOTH
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_job_with_a_stalled_reader(tmp_path: Path, is_terminal: bool, number: signal.Signals) -> None:
    with stuck(tmp_path, is_terminal=is_terminal) as job:
        begin = time.monotonic()
        job.process.send_signal(number)
        wait_until(lambda: any(e["event"] == "stopping" for e in read_events(tmp_path / "logs")), "stopping")
        job.process.send_signal(number)  # at once now
        assert job.process.wait(timeout=60) == 128 + number
        assert time.monotonic() - begin < longer(_ANSWER_S)
        assert job.left() == []


def test_the_timeout_ends_a_job_with_a_stalled_reader(tmp_path: Path) -> None:
    with stuck(tmp_path, "--timeout", "6") as job:
        assert job.process.wait(timeout=60) == 124
        assert job.left() == []


def test_a_slow_reader_gets_all_output_of_a_successful_job(tmp_path: Path) -> None:
    """More output than the pipe and the queue hold; the reader starts after the workers have ended."""
    script = write_script(tmp_path, "for i in range(30_000): print(i, 'x' * 100)")
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--log-dir", "logs", script],
        cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        time.sleep(4)
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    for rank in (b"0", b"1"):
        own = [line for line in lines if line.startswith(b"[%s] " % rank)]
        assert [int(line.split()[1]) for line in own] == list(range(30_000))


def test_a_full_disk_is_reported_and_the_logs_are_complete(tmp_path: Path) -> None:
    """`/dev/full` answers as a full disk does; stdout goes there."""
    script = write_script(tmp_path, "for i in range(10): print('result', i)")
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "tfdistkit", "run", "-np", "2", script],
            cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, stdin=subprocess.DEVNULL, stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert "the output could not be written (stdout: [Errno 28] No space left on device)" in ended.stderr
    kept = next(tmp_path.glob("tfdistkit-*"))
    assert str(kept) in ended.stderr
    assert (kept / "rank.1/stdout").read_text().count("result") == 10


def test_a_closed_reader_is_no_error(tmp_path: Path) -> None:
    script = write_script(tmp_path, "for i in range(10_000): print('result', i)")
    command = f"{sys.executable} -m tfdistkit run -q -np 2 {script} | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "result 0" in ended.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_descriptors(tmp_path: Path, closed: str) -> None:
    """Files that the launcher opens must not get the descriptors of its output."""
    script = write_script(tmp_path, "import sys; print('to stdout'); print('to stderr', file=sys.stderr)")
    command = f"{sys.executable} -m tfdistkit run -np 2 --log-dir logs {script} {closed}"
    code = subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=60, check=False).returncode
    assert code == 0
    text = (tmp_path / "logs/events.jsonl").read_text()
    assert "to std" not in text
    events = read_events(tmp_path / "logs")
    assert [events[0]["event"], events[-1]["event"]] == ["job_started", "job_ended"]
    assert (tmp_path / "logs/rank.1/stderr").read_text() == "to stderr\n"


WAITS = """
import os, pathlib, signal, time
pathlib.Path("up." + os.environ["TFDISTKIT_RANK"]).touch()
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
pathlib.Path("seen." + os.environ["TFDISTKIT_RANK"]).write_text(
    f"{signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL} {signal.SIGTERM in blocked}")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
raise SystemExit(7 if os.environ["TFDISTKIT_RANK"] == "1" else 0)
"""


def _start_with(folder: Path, prepare: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tfdistkit", "run", "-np", "2", write_script(folder, WAITS)]
    start = f"import os, signal, sys; {prepare}; os.execv(sys.executable, {words!r})"
    return subprocess.Popen([sys.executable, "-c", start], cwd=folder, env={**os.environ, "TMPDIR": str(folder)})


def test_a_caller_that_ignores_sigchld(tmp_path: Path) -> None:
    """The kernel would reap the workers, and their exit codes would be lost."""
    process = _start_with(tmp_path, "signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    try:
        wait_until(lambda: (tmp_path / "seen.0").exists(), "the first worker")
        (tmp_path / "go").touch()
        assert process.wait(timeout=60) == 7
        assert (tmp_path / "seen.0").read_text() == "True False"
    finally:
        process.kill()
        process.wait()


def test_a_caller_that_blocks_sigterm(tmp_path: Path) -> None:
    process = _start_with(tmp_path, "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])")
    try:
        wait_until(lambda: (tmp_path / "seen.0").exists() and (tmp_path / "seen.1").exists(), "the workers")
        assert (tmp_path / "seen.0").read_text() == "True False"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_a_forked_child_that_raises_does_not_end_its_rank(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, time
        child = os.fork()
        if not child:
            raise ValueError("of the child")
        os.waitpid(child, 0)
        time.sleep(4)  # the launcher would have ended it by now
        print("done")
        """,
    )
    ended = subprocess.run(
        [sys.executable, "-m", "tfdistkit", "run", "-np", "2", script], cwd=tmp_path, stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
    shown = ended.stderr.count("ValueError: of the child") + ended.stderr.count("the same traceback as")
    assert shown == 2, ended.stderr


NOTEBOOK = """
import os, signal, sys, threading, time
import tfdistkit


def train():
    import pathlib, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it takes a while to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pathlib.Path("up." + __import__("os").environ["TFDISTKIT_RANK"]).touch()
    time.sleep(600)


def interrupt_twice():
    while not (os.path.exists("up.0") and os.path.exists("up.1")):
        time.sleep(0.02)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


threading.Thread(target=interrupt_twice, daemon=True).start()
try:
    tfdistkit.launch(train, np=2)
except KeyboardInterrupt:
    open("interrupted", "w").close()
time.sleep(5)  # a notebook goes on
"""


def test_ctrl_c_twice_in_a_notebook_leaves_no_worker(tmp_path: Path) -> None:
    script = write_script(tmp_path, NOTEBOOK)
    process = subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path), "NOTEBOOK": str(tmp_path)},
        stdin=subprocess.DEVNULL, preexec_fn=heed_signals,  # noqa: PLW1509
    )  # fmt: skip
    try:
        wait_until((tmp_path / "interrupted").exists, "the end of launch")
        # While the notebook still lives.
        assert [pid for pid in marked_processes(f"NOTEBOOK={tmp_path}") if pid != process.pid] == []
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
