"""Stacks of a process that another one asks for: by a signal, or with py-spy where no signal helps."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dead_disk import dead_disk, why_no_fuse

from tfdistkit import env
from tfdistkit.launcher.local import py_spy, stack_request
from tfdistkit.launcher.local.blocked import blocked_calls
from tfdistkit.launcher.local.watchdog import process_state
from tfdistkit.supervise.hangs.requests import Answer, ask_for_stacks

needs_fuse = pytest.mark.skipif(bool(why_no_fuse()), reason=f"A dead disk is not tested: {why_no_fuse()}")

BEGIN = """
import os, signal, sys, threading, time
from tfdistkit.report.hangs import notes, stacks
from tfdistkit.report.hangs.layout import STACKS_SIGNAL
notes.begin()
if sys.argv[1] == "own handler":
    signal.signal(STACKS_SIGNAL, lambda *_: print("signal", flush=True))
stacks.answer_requests()
if sys.argv[1] == "blocks":
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])
if "threads" in sys.argv[1]:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

def waits():
    print("begun", flush=True)
    open(sys.argv[2]).read() if len(sys.argv) > 2 else time.sleep(1000)

waits()
"""


@contextlib.contextmanager
def process(folder: Path, kind: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a job that waits in its function `waits`."""
    environment = {**os.environ, env.TASK_DIR: str(folder)}
    (folder / "train.py").write_text(BEGIN)
    command = [sys.executable, str(folder / "train.py"), kind, *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None and one.stdout.readline() == "begun\n"
        try:
            yield one
        finally:
            one.kill()


def asked(folder: Path) -> Answer:
    (found,) = ask_for_stacks([folder])
    return found


def functions(answer: Answer) -> list[str]:
    return [frame.function for thread in answer.threads for frame in thread.frames]


def wait_for_a_call(pid: int) -> None:
    deadline = time.monotonic() + 60
    while not blocked_calls(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_request, "find_py_spy", lambda: None)


@pytest.mark.parametrize("kind", ["is suspended", "blocks", "own handler"])
def test_py_spy_reads_what_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with process(tmp_path, kind) as one:
        if kind == "is suspended":
            one.send_signal(signal.SIGSTOP)
            while process_state(one.pid) != "T":
                time.sleep(0.01)
        found = asked(tmp_path)
        assert found.is_spied and functions(found) == ["waits", "<module>"] and not found.no_stack
        assert found.threads[0].ident == found.notes.main_thread  # type: ignore[union-attr]
        without_py_spy(monkeypatch)
        found = asked(tmp_path)
        why = "it is suspended (SIGSTOP)" if kind == "is suspended" else "it did not answer"
        assert not found.threads and found.no_stack == f"{why}, and py-spy is not installed"
        one.send_signal(signal.SIGCONT)
        one.kill()
        assert one.stdout is not None and one.stdout.read() == ""  # a handler of the script is left alone


@needs_fuse
@pytest.mark.parametrize("kind", ["one thread", "two threads"])
def test_a_main_thread_that_a_disk_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Another thread writes the stacks of all, and of a process without another one, py-spy reads them."""
    if kind == "two threads":
        without_py_spy(monkeypatch)
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(dead_disk(tmp_path / "disk"))
        with process(tmp_path, kind, str(disk / "train.csv")) as one:
            try:
                wait_for_a_call(one.pid)
                # On a busy machine py-spy may not end within its deadline.
                found = next((answer for answer in (asked(tmp_path) for _ in range(5)) if answer.threads), None)
            finally:
                one.kill()
                stack.close()  # Only then does the process end.
    assert found is not None
    # A signal interrupts a read that the disk has not taken yet, so one thread may answer by itself.
    assert not (found.is_spied and kind == "two threads") and functions(found)[-2:] == ["waits", "<module>"]
    assert found.blocked == (f"reading {disk / 'train.csv'}",)


def test_a_file_that_nothing_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a fifo")
    with process(tmp_path, "answers", str(tmp_path / "a fifo")) as one:
        wait_for_a_call(one.pid)
        assert asked(tmp_path).blocked == (f"opening {tmp_path / 'a fifo'}",)


PROGRAMS = {
    "sleep 1000": "py-spy did not end within 0.5 s",
    "echo 'Error: Failed'; echo 'Caused by:'; echo '  0: Operation not permitted'; exit 1": (
        "py-spy failed: Operation not permitted"
    ),
    "exit 3": "py-spy failed with exit code 3",
    "echo nonsense": "py-spy failed: nonsense",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_py_spy_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    path = tmp_path / "py-spy"
    path.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{program}\n")
    path.chmod(0o700)
    monkeypatch.setattr(stack_request, "find_py_spy", lambda: str(path))
    monkeypatch.setattr(py_spy, "_TIMEOUT_S", 0.5)
    with process(tmp_path, "own handler"):
        assert asked(tmp_path).no_stack == f"it did not answer, and {PROGRAMS[program]}"
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()  # reaped


def test_py_spy_is_found_beside_python_or_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("bin", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "py-spy").touch(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    assert py_spy.find_py_spy() == str(tmp_path / "bin/py-spy")
    (tmp_path / "bin/py-spy").unlink()
    assert py_spy.find_py_spy() == str(tmp_path / "path/py-spy")
    (tmp_path / "path/py-spy").unlink()
    assert py_spy.find_py_spy() is None
