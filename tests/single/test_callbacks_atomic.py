"""Atomic writes: complete files or none, even if the writer is killed."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from tfdistkit import atomic_files as atomic

pytestmark = pytest.mark.tensorflow  # the package imports Keras

# Writes files of one repeated letter forever. Loads the module by its path, without TensorFlow, to start at once.
WRITER = """
import importlib.util, itertools, sys
spec = importlib.util.spec_from_file_location("atomic", sys.argv[1])
atomic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(atomic)
print("ready", flush=True)
for letter in itertools.cycle(b"abc"):
    with atomic.whole_file(sys.argv[2]) as partial:
        with open(partial, "wb") as file:
            for _ in range(200):
                file.write(bytes([letter]) * 10_000)
"""


def leftovers(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("."))


def write(path: pathlib.Path, text: str) -> None:
    with atomic.whole_file(str(path)) as partial:
        pathlib.Path(partial).write_text(text)


def test_a_killed_writer_never_leaves_a_partial_file(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "file"
    moments = random.Random(0)
    caught_in_the_middle = 0
    for _ in range(25):
        command = [sys.executable, "-c", WRITER, atomic.__file__, str(target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0.0, 0.05))
            writer.send_signal(signal.SIGKILL)
            writer.wait(timeout=30)
        caught_in_the_middle += bool(leftovers(tmp_path))
        assert len(leftovers(tmp_path)) <= 1  # each writer removed what the one before left
        if target.exists():
            content = target.read_bytes()
            assert len(content) == 2_000_000 and len(set(content)) == 1
    assert caught_in_the_middle > 0  # else this test shows nothing
    write(target, "next")
    assert leftovers(tmp_path) == [] and target.read_text() == "next"


def test_an_error_keeps_the_previous_file(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "file"
    write(target, "before")
    with pytest.raises(KeyboardInterrupt), atomic.whole_file(str(target)) as partial:
        pathlib.Path(partial).write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before" and leftovers(tmp_path) == []


def test_only_leftovers_of_dead_writers_are_removed(tmp_path: pathlib.Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=30)
    host, pid, living = socket.gethostname(), os.getpid(), os.getppid()
    names = {
        "dead": f".tfdistkit-{dead.pid}-0a-x@{host}.partial",
        "earlier process of our number": f".tfdistkit-{pid}-0a-x@{host}.partial",
        "old, elsewhere": f".tfdistkit-1-0a-x@{host}-2.partial",
        "living": f".tfdistkit-{living}-0a-x@{host}.partial",
        "our own": f".tfdistkit-{pid}-{atomic._TOKEN}-x@{host}.partial",
        "young, elsewhere": f".tfdistkit-1-0b-x@{host}-2.partial",
        "not ours": ".tfdistkit-notes.partial",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.keras").write_text("half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(tmp_path / names["old, elsewhere"], (two_days_ago, two_days_ago))
    write(tmp_path / "file", "whole")
    kept = {key for key, name in names.items() if (tmp_path / name).exists()}
    assert kept == {"living", "our own", "young, elsewhere", "not ours"}


def test_a_link_is_followed_and_the_mode_follows_umask(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "file")
    write(tmp_path / "link", "text")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_text() == "text"
    assert (tmp_path / "elsewhere" / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
