"""`tfdistkit run` with two real workers: their environment, the console, the logs, the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import job, run_job, wait_until, write_script

from tfdistkit.cluster import from_tf_config
from tfdistkit.report import read_events

TELL = """
    import json, os, sys
    print(json.dumps({"argv": sys.argv[1:], "env": {k: v for k, v in os.environ.items()}}))
"""


def reports_by_rank(stdout: str) -> dict[int, dict]:
    """What each rank printed about itself."""
    return {int(line[1]): json.loads(line[4:]) for line in stdout.splitlines() if re.match(r"\[\d\] \{", line)}


def test_two_workers_get_their_ranks(tmp_path: Path) -> None:
    script = write_script(tmp_path, TELL)
    ended = run_job("-np", "2", "--env", "COLOUR=sky blue", "--env", "A=b=c", script, "--lr", "1", cwd=tmp_path)
    assert (ended.code, ended.stderr) == (0, f"tfdistkit: starting 2 workers on this machine: {script}\n")
    ranks = reports_by_rank(ended.stdout)
    assert sorted(ranks) == [0, 1]
    clusters = [from_tf_config(ranks[rank]["env"]["TF_CONFIG"]) for rank in (0, 1)]
    assert [cluster.rank for cluster in clusters] == [0, 1]
    assert clusters[0].workers == clusters[1].workers and len(set(clusters[0].workers)) == 2
    assert all(address.startswith("127.0.0.1:") for address in clusters[0].workers)
    for rank in (0, 1):
        variables = ranks[rank]["env"]
        assert ranks[rank]["argv"] == ["--lr", "1"]
        assert (variables["TFDISTKIT_LOCAL_RANK"], variables["TFDISTKIT_LOCAL_WORLD_SIZE"]) == (str(rank), "2")
        assert (variables["COLOUR"], variables["A"]) == ("sky blue", "b=c")
        assert int(variables["TF_NUM_INTRAOP_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
        assert int(variables["TF_NUM_INTEROP_THREADS"]) >= 2


def test_the_temporary_run_folder_is_removed_after_a_success(tmp_path: Path) -> None:
    ended = run_job("-np", "2", write_script(tmp_path, TELL), cwd=tmp_path)
    run_dir = Path(reports_by_rank(ended.stdout)[0]["env"]["TFDISTKIT_RUN_DIR"])
    assert run_dir.parent == tmp_path and not run_dir.exists()


def test_the_temporary_run_folder_is_kept_and_named_after_a_failure(tmp_path: Path) -> None:
    # Only rank 0 fails: a rank that another's failure ends may not have printed yet.
    script = """
        import os, time
        if os.environ["TFDISTKIT_RANK"] == "1":
            time.sleep(60)
        print("kept")
        raise ValueError("no")
    """
    ended = run_job("-np", "2", write_script(tmp_path, script), cwd=tmp_path)
    (run_dir,) = tmp_path.glob("tfdistkit-*")
    assert str(run_dir) in ended.stderr
    assert (run_dir / "rank.0" / "stdout").read_text() == "kept\n"


def test_variables_of_the_user_take_precedence(tmp_path: Path) -> None:
    script = write_script(tmp_path, TELL)
    ended = run_job("-np", "2", "--env", "TF_NUM_INTEROP_THREADS=7", script, cwd=tmp_path, OMP_NUM_THREADS="5")
    variables = reports_by_rank(ended.stdout)[1]["env"]
    assert (variables["OMP_NUM_THREADS"], variables["TF_NUM_INTEROP_THREADS"]) == ("5", "7")


def test_tf_config_of_the_shell_is_replaced_with_a_note(tmp_path: Path) -> None:
    ended = run_job("-np", "2", write_script(tmp_path, TELL), cwd=tmp_path, TF_CONFIG='{"cluster": {}}')
    assert "TF_CONFIG of this shell is not used" in ended.stderr
    assert len(from_tf_config(reports_by_rank(ended.stdout)[0]["env"]["TF_CONFIG"]).workers) == 2


def test_a_module(tmp_path: Path) -> None:
    write_script(tmp_path, "", name="package/__init__.py")
    write_script(tmp_path, "import sys\nprint(__name__, __spec__.name, sys.argv[1:])", name="package/part.py")
    ended = run_job("-np", "2", "-m", "package.part", "-m", "--x", cwd=tmp_path)
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] __main__ package.part ['-m', '--x']" for rank in (0, 1)]


def test_the_logs_are_kept_byte_for_byte(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        r"""
        import os, sys
        rank = os.environ["TFDISTKIT_RANK"].encode()
        for stream in (1, 2):
            data = bytes(range(256)) * 1000 + b"\r\n bar\b\b\b\r bar " + rank + b"%d no newline" % stream
            while data:
                data = data[os.write(stream, data):]
        """,
    )
    ended_code = run_job_bytes(tmp_path, script)
    assert ended_code == 0
    for rank in (0, 1):
        for number, name in ((1, "stdout"), (2, "stderr")):
            kept = (tmp_path / "logs" / f"rank.{rank}" / name).read_bytes()
            assert kept == bytes(range(256)) * 1000 + b"\r\n bar\b\b\b\r bar %d%d no newline" % (rank, number)


def run_job_bytes(tmp_path: Path, script: str) -> int:
    with job("-np", "2", "--log-dir", "logs", script, cwd=tmp_path) as running:
        return running.process.wait(timeout=60)


def test_lines_of_several_workers_do_not_mix(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        for i in range(2000):
            sys.stdout.write(os.environ["TFDISTKIT_RANK"] * 40)
            sys.stdout.write(f" {i}\\n")
        """,
    )
    ended = run_job("-np", "2", script, cwd=tmp_path)
    lines = ended.stdout.splitlines()
    assert len(lines) == 4000
    for rank in "01":
        of_rank = [line for line in lines if line.startswith(f"[{rank}]")]
        assert of_rank == [f"[{rank}] {rank * 40} {i}" for i in range(2000)]


def test_output_is_shown_immediately(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\nprint('now')\ntime.sleep(600)")
    with job("-np", "2", script, cwd=tmp_path) as running:
        wait_until(lambda: "[0] now" in running.stdout and "[1] now" in running.stdout, "the first lines")
        assert running.process.poll() is None


def test_a_single_worker_looks_as_under_plain_python(tmp_path: Path) -> None:
    script = write_script(tmp_path, r"print('1/2\r', end=''); print('2/2', end='')")
    run_job("-np", "1", script, cwd=tmp_path)
    assert (tmp_path / "job.stdout").read_bytes() == b"1/2\r2/2"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("sys.exit('with a message')", 1),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getpid(), 11)", 139),
    ],
)
def test_the_exit_code_of_the_failing_worker(tmp_path: Path, line: str, code: int) -> None:
    script = write_script(
        tmp_path,
        f"""
        import os, sys, time
        if os.environ["TFDISTKIT_RANK"] == "1":
            {line}
        time.sleep(600)
        """,
    )
    ended = run_job("-np", "2", script, cwd=tmp_path)
    assert ended.code == code
    assert re.search(rf"^rank 1 .*pid \d+, exit code {code}\)$", ended.stderr, re.MULTILINE)
    assert "Stopped because of it: rank 0." in ended.stderr


def test_a_single_worker_has_its_exit_code_too(tmp_path: Path) -> None:
    assert run_job("-np", "1", write_script(tmp_path, "raise SystemExit(7)"), cwd=tmp_path).code == 7


def test_the_report_contains_the_traceback_and_the_log(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, time
        def deep():
            raise KeyError("lost")
        if os.environ["TFDISTKIT_RANK"] == "1":
            deep()
        time.sleep(600)
        """,
    )
    ended = run_job("-np", "2", "--log-dir", "logs", script, cwd=tmp_path)
    report = ended.stderr[ended.stderr.index("tfdistkit: the job failed") :]
    assert "rank 1 raised KeyError" in report and os.uname().nodename in report
    assert str(tmp_path / "logs" / "rank.1" / "stderr") in report
    assert "raise KeyError" in report and "KeyError: 'lost'" in report
    assert "worker.py" not in ended.stderr
    record = json.loads((tmp_path / "logs" / "rank.1" / "error.json").read_text())
    assert (record["rank"], record["type"], record["exit_code"]) == (1, "KeyError", 1)
    events = read_events(tmp_path / "logs")
    assert [event["event"] for event in events][0] == "job_started"
    assert events[-1]["event"] == "job_ended" and events[-1]["first_failure"]["rank"] == 1


def test_a_later_failure_is_not_reported_as_the_cause(tmp_path: Path) -> None:
    """Rank 1 fails first but needs long to shut down; rank 0 fails because of it and is gone at once."""
    script = write_script(
        tmp_path,
        """
        import atexit, os, pathlib, time
        failed = pathlib.Path(os.environ["TFDISTKIT_RUN_DIR"]) / "rank.1" / "error.json"
        if os.environ["TFDISTKIT_RANK"] == "1":
            atexit.register(time.sleep, 1)
            raise ValueError("the cause")
        while not failed.exists():
            time.sleep(0.01)
        raise RuntimeError("the consequence")
        """,
    )
    ended = run_job("-np", "2", script, cwd=tmp_path)
    assert "the first failure was\nrank 1 raised ValueError" in ended.stderr
    assert "Later, rank 0 raised RuntimeError too." in ended.stderr


def test_errors_of_an_earlier_run_are_not_reported(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    assert run_job("-np", "2", "--log-dir", "logs", write_script(tmp_path, "1 / 0"), cwd=tmp_path).code == 1
    assert list(logs.glob("rank.*/error.json")), "of one at least: the other one may be stopped before"
    assert run_job("-np", "2", "--log-dir", "logs", write_script(tmp_path, "print(1)"), cwd=tmp_path).code == 0
    assert not list(logs.glob("rank.*/error.json"))
    assert (logs / "rank.0" / "stdout").read_text() == "1\n"


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, "open('started', 'w')")
    ended = run_job("-np", "2", "--dry-run", "--env", "A=b c", script, "it's", cwd=tmp_path)
    assert ended.code == 0
    assert not (tmp_path / "started").exists() and not list(tmp_path.glob("tfdistkit-*"))
    for rank, line in enumerate(ended.stdout.splitlines()):
        assert line.startswith(f"rank {rank}: ") and "A='b c'" in line and "TF_CONFIG=" in line
        assert line.endswith(f"""-m tfdistkit.worker {script} 'it'"'"'s'""")


def test_a_closed_reader_does_not_end_the_job(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import os\nfor i in range(50000): print('x' * 50)\nopen('done' + os.environ['TFDISTKIT_RANK'], 'w')"
    )
    command = f"TMPDIR={tmp_path} {sys.executable} -m tfdistkit run -np 2 {script} | head -1"
    shown = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, timeout=60, check=True).stdout
    assert shown.count(b"\n") == 1
    wait_until(lambda: (tmp_path / "done0").exists() and (tmp_path / "done1").exists(), "the end of both workers")


def test_only_a_single_worker_reads_stdin_of_the_launcher(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import sys\nprint(repr(sys.stdin.read()))")
    for np, shown in (("1", "'words'\n"), ("2", "[0] ''\n[1] ''\n")):
        command = [sys.executable, "-m", "tfdistkit", "run", "-np", np, script]
        ended = subprocess.run(command, input="words", capture_output=True, text=True, timeout=60, check=True)
        assert "".join(sorted(ended.stdout.splitlines(keepends=True))) == shown


def test_a_progress_bar_moves_on_a_terminal(tmp_path: Path) -> None:
    """On a real pseudo-terminal: each state appears as it comes, over the one before."""
    script = write_script(
        tmp_path,
        r"""
        import os, pathlib, time
        if os.environ["TFDISTKIT_RANK"] == "0":
            for step in "123":
                print("\b" * 3 + "\r" + step + "/3", end="", flush=True)
                while not pathlib.Path("go" + step).exists():
                    time.sleep(0.01)
            print()
        """,
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdistkit", "run", "-np", "2", script],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    screen = b""

    def shows(text: bytes) -> bool:
        nonlocal screen
        with contextlib.suppress(OSError):  # nothing there now, or the other end is closed
            screen += os.read(ours, 4096)
        return text in screen

    try:
        for step in (b"1", b"2", b"3"):
            wait_until(lambda step=step: shows(b"\r\x1b[K[0] %s/3" % step), "the progress bar")
            (tmp_path / f"go{step.decode()}").touch()
        assert process.wait(timeout=60) == 0
        wait_until(lambda: shows(b"[0] 3/3\r\n"), "the last line")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
