"""The console of a job: one line at the start, the script's own lines, each traceback once."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import run_job, write_script

NOISE = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795392860.823883    6299 grpc_server_lib.cc:467] Started server with target: grpc://127.0.0.1:20114
"""

NOISY = f"""
import os, sys
os.write(2, {NOISE!r}.encode())
print("mine", file=sys.stderr)
print("result")
if "fail" in sys.argv:
    os.write(2, {NOISE!r}.encode())
    os._exit(3)
"""


@pytest.mark.parametrize("np", ["1", "2"])
def test_startup_lines_are_only_in_the_logs(tmp_path: Path, np: str) -> None:
    script = write_script(tmp_path, NOISY)
    ended = run_job("-np", np, "--log-dir", "logs", script, cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="")
    count = "1 worker" if np == "1" else "2 workers"
    first, *rest = ended.stderr.splitlines()
    assert first == f"tfdistkit: starting {count} on this machine: {script}"
    assert sorted(rest) == (["mine"] if np == "1" else ["[0] mine", "[1] mine"])
    assert (tmp_path / "logs/rank.0/stderr").read_text() == NOISE + "mine\n"

    for words, variables in ((["-v"], {}), ([], {"TF_CPP_MIN_LOG_LEVEL": "0"})):
        ended = run_job("-np", np, *words, script, cwd=tmp_path, **variables)
        assert ended.stderr.count("Started server") == int(np), ended.stderr

    ended = run_job("-np", np, "--quiet", script, cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="3")
    assert sorted(ended.stderr.splitlines()) == sorted(rest)


def test_the_report_shows_the_last_lines_of_the_script(tmp_path: Path) -> None:
    ended = run_job("-np", "1", write_script(tmp_path, NOISY), "fail", cwd=tmp_path)
    assert ended.code == 3 and "the last lines of its log:\n    mine\nAll logs" in ended.stderr


def test_the_startup_of_tensorflow_is_one_line(tmp_path: Path) -> None:
    """Of the TensorFlow that is installed here: what it logs today is known."""
    script = """
        import tensorflow as tf, tfdistkit
        strategy = tfdistkit.strategy("multiworker", communication="ring")  # It starts a server.
        with strategy.scope():
            variable = tf.Variable(1.0)
        print(strategy.num_replicas_in_sync, flush=True)
    """
    words = ("-np", "2", "--log-dir", "logs", "--timeout", "60")
    ended = run_job(*words, write_script(tmp_path, script), cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="")
    assert ended.code == 0 and sorted(ended.stdout.splitlines()) == ["[0] 2", "[1] 2"]
    first, *rest = ended.stderr.splitlines()
    assert first.startswith("tfdistkit: starting 2 workers on this machine: ") and rest == []
    assert "Started server with target" in (tmp_path / "logs/rank.0/stderr").read_text()


# Both ranks print their tracebacks before one of them ends, at which the launcher would stop the other.
END_TOGETHER = """
        import atexit, os, pathlib, sys, time
        def together():
            pathlib.Path("ended." + os.environ["TFDISTKIT_RANK"]).touch()
            while len(list(pathlib.Path().glob("ended.*"))) < 2:
                time.sleep(0.01)
        atexit.register(together)
"""


def test_a_failure_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    script = (
        END_TOGETHER
        + """
        print("rank", os.environ["TFDISTKIT_RANK"], file=sys.stderr, flush=True)
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("a text\\nof two lines") from error
    """
    )
    ended = run_job("-np", "2", "--log-dir", "logs", write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 1
    shown = [line for line in ended.stderr.splitlines() if line.startswith("[")]
    assert {"[0] rank 0", "[1] rank 1"} <= set(shown)
    assert sum(line[4:] == "of two lines" for line in shown) == 1
    assert sum("KeyError: 'missing'" in line for line in shown) == 1
    assert sum(line in ("[1] the same traceback as [0]", "[0] the same traceback as [1]") for line in shown) == 1
    logs = [(tmp_path / f"logs/rank.{rank}/stderr").read_text().partition("\n")[2] for rank in (0, 1)]
    assert logs[0] == logs[1] and logs[0].endswith("ValueError: a text\nof two lines\n")


def test_different_failures_are_all_shown(tmp_path: Path) -> None:
    script = (
        END_TOGETHER
        + """
        raise ValueError("in " + os.environ["TFDISTKIT_RANK"])
    """
    )
    ended = run_job("-np", "2", write_script(tmp_path, script), cwd=tmp_path)
    assert "[0] ValueError: in 0\n" in ended.stderr and "[1] ValueError: in 1\n" in ended.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("input('Go on? ')", "EOFError: EOF when reading a line\n[1] Workers have no terminal: "),
        ("import getpass; getpass.getpass()", "EOFError: EOF when reading a line\n[1] Workers have no terminal: "),
        ("breakpoint()", "bdb.BdbQuit: Workers have no terminal for the debugger."),
    ],
)
def test_a_prompt_of_a_worker_fails_with_an_explanation(tmp_path: Path, line: str, message: str) -> None:
    script = f"import os\nif os.environ['TFDISTKIT_RANK'] == '1':\n    {line}\n    pass\n"
    ended = run_job("-np", "2", write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 1 and f"[1] {message}" in ended.stderr
    report = ended.stderr[ended.stderr.index("tfdistkit: the job failed") :]
    assert "Workers have no terminal" in report


def test_a_script_that_handles_eof_is_not_changed(tmp_path: Path) -> None:
    script = """
        try:
            input()
        except EOFError as error:
            print(error.args)
    """
    ended = run_job("-np", "2", write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 0 and "[0] ('EOF when reading a line',)\n" in ended.stdout


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"TERM": "dumb", "FORCE_COLOR": "1"}, True)],
)
def test_labels_have_colours_on_a_terminal(tmp_path: Path, variables: dict[str, str], is_coloured: bool) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    ours, theirs = pty.openpty()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--log-dir", "logs",
             write_script(tmp_path, "print('x')")],
            cwd=tmp_path, env={**inherited, "TERM": "xterm", **variables}, stdin=subprocess.DEVNULL, stdout=theirs,
            stderr=subprocess.PIPE, timeout=60, check=True,
        )  # fmt: skip
        shown = os.read(ours, 10_000)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (b"\x1b[36m[0]\x1b[0m x" in shown and b"\x1b[33m[1]\x1b[0m x" in shown) == is_coloured, shown
    assert (b"[0] x" in shown and b"[1] x" in shown) != is_coloured
    assert b"\x1b[3" not in ended.stderr, "stderr is no terminal"
    assert (tmp_path / "logs/rank.0/stdout").read_text() == "x\n"
