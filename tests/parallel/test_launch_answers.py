"""`tfdistkit.launch` answers whatever becomes of its output, as `tfdistkit run` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import heed_signals, wait_until, write_script

from tfdistkit.launcher.local.watchdog import marked_processes

# More than a pipe takes, which nobody reads; what came of it goes to a file.
TALKS = """
    import os, pathlib, sys, traceback
    import tfdistkit

    def talk(fails):
        import os
        print("x" * 1000 * 200)
        if fails and os.environ["TFDISTKIT_RANK"] == "1":
            raise ValueError("of rank 1")
        return int(os.environ["TFDISTKIT_RANK"])

    try:
        told = repr(tfdistkit.launch(talk, ("fails" in sys.argv,), np=2))
    except BaseException as error:
        told = type(error).__name__
    pathlib.Path("told").write_text(told)
"""


def start(folder: Path, *words: str, **files: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, write_script(folder, TALKS), *words]
    variables = {**os.environ, "TMPDIR": str(folder), "TALKS": str(folder)}
    ends = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **files}
    return subprocess.Popen(command, cwd=folder, env=variables, preexec_fn=heed_signals, **ends)  # noqa: PLW1509


def left(folder: Path) -> list[int]:
    return marked_processes(f"TALKS={folder}")


@pytest.mark.parametrize("fails", [True, False])
def test_unread_output_does_not_keep_workers_alive(tmp_path: Path, fails: bool) -> None:
    ours, theirs = os.pipe()
    process = start(tmp_path, *(["fails"] if fails else []), stdout=theirs)
    os.close(theirs)
    try:
        if fails:
            assert process.wait(timeout=60) == 0
        else:
            logs = [f"rank.{rank}/result.pkl" for rank in (0, 1)]
            wait_until(lambda: all(list(tmp_path.glob(f"tfdistkit-*/{log}")) for log in logs), "the results")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=4)  # the output is all there is to show, so it waits for a reader
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        assert (tmp_path / "told").read_text() == ("WorkerFailedError" if fails else "KeyboardInterrupt")
        assert left(tmp_path) == []
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def test_a_slow_reader_gets_all_of_it(tmp_path: Path) -> None:
    process = start(tmp_path, stdout=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, b"") and stdout.count(b"x") == 400_000
    assert (tmp_path / "told").read_text() == "[0, 1]" and list(tmp_path.glob("tfdistkit-*")) == []


def test_a_full_disk(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(tmp_path, stdout=full.fileno())
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and (tmp_path / "told").read_text() == "[0, 1]"
    (run_dir,) = tmp_path.glob("tfdistkit-*")
    assert f"could not be written (stdout: [Errno 28] No space left on device). It is in {run_dir}." in stderr.decode()
    assert (run_dir / "rank.0/stdout").stat().st_size == 200_001


@pytest.mark.parametrize("fails", [True, False])
def test_closed_descriptors(tmp_path: Path, fails: bool) -> None:
    command = f"exec {sys.executable} {write_script(tmp_path, TALKS)} {'fails' * fails} <&- >&- 2>&-"
    variables = {**os.environ, "TMPDIR": str(tmp_path), "TALKS": str(tmp_path)}
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=variables, timeout=60, check=False).returncode == 0
    assert (tmp_path / "told").read_text() == ("WorkerFailedError" if fails else "[0, 1]")
    for log in tmp_path.glob("tfdistkit-*/rank.1/stdout"):  # rank 0 may be ended while it prints
        assert log.stat().st_size == 200_001
    assert left(tmp_path) == []


def test_stdout_alone_is_closed(tmp_path: Path) -> None:
    command = f"exec {sys.executable} {write_script(tmp_path, TALKS)} >&-"
    ended = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, b"") and (tmp_path / "told").read_text() == "[0, 1]"
