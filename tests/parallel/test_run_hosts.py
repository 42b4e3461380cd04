"""`tfdistkit run -H localhost:N`: a host without ssh, which works anywhere. For ssh, see tests/integration."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from job_process import job, run_job, wait_until, write_script

SCRIPT = """
    import os, pathlib, subprocess, sys, time
    rank = os.environ["TFDISTKIT_RANK"]
    print("rank", rank, os.environ["TF_CONFIG"], sys.argv[1:], flush=True)
    pathlib.Path("up." + rank).touch()
    if "family" in sys.argv:
        subprocess.Popen(["sleep", "601"], start_new_session=True)
        time.sleep(600)
    while not pathlib.Path("up.0").exists():
        time.sleep(0.02)
    if rank == "1":
        raise ValueError("no")
    time.sleep(600)
"""


def test_a_host_that_is_this_machine_needs_no_ssh(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    ended = run_job("-H", "localhost:2", "--log-dir", "logs", script, "a  b", cwd=tmp_path, PATH="/nowhere")
    assert (
        ended.code == 1
        and "rank 1 raised ValueError" in ended.stderr
        and "Stopped because of it: rank 0." in (ended.stderr)
    )
    assert re.search(r"^localhost +here +3\.\d+", ended.stderr, re.MULTILINE)
    for rank in (0, 1):
        assert re.search(rf"^\[{rank}\] rank {rank} .*127\.0\.0\.1.* \['a  b'\]$", ended.stdout, re.MULTILINE)
    assert (tmp_path / "logs" / "rank.1" / "error.json").exists()
    assert not list(tmp_path.glob("tfdistkit-*")), "the agent's folder is gone"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_ends(tmp_path: Path, number: signal.Signals) -> None:
    with job("-H", "localhost:2", write_script(tmp_path, SCRIPT), "family", cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "up.0", tmp_path / "up.1")
        os.kill(running.process.pid, number)
        code = running.end(deadline_s=30).code
        assert code == (130 if number is signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: running.left() == [], "the end of all marked processes", deadline_s=15)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-H", "localhost", "-np", "2"], "`-np` must be at most 1, the number of slots. Received: -np 2"),
        (["-H", "localhost", "--hostfile", "x"], "not allowed with argument"),
        (["--python", "x", "-np", "1"], "--python requires other hosts. Add -H HOST:SLOTS"),
        (["-H", "localhost", "--ssh-port", "0"], "`--ssh-port` must be an integer from 1 to 65535"),
        (["-H", "localhost", "-x", "NOT_HERE_AT_ALL"], "there is no variable NOT_HERE_AT_ALL in this shell"),
        (
            ["-H", "localhost", "--python", "/no/such/python"],
            "`--python` must be the path of a Python on every host. Received: /no/such/python",
        ),
        (["--hostfile", "/no/such/file"], "`--hostfile` must be a readable text file"),
    ],
)
def test_invalid_options_are_rejected(tmp_path: Path, words: list[str], message: str) -> None:
    ended = run_job(*words, write_script(tmp_path, SCRIPT), cwd=tmp_path)
    assert ended.code == 2 and message in ended.stderr
    assert not list(tmp_path.glob("up.*")) and not list(tmp_path.glob("tfdistkit-*"))
