"""Scripts that can be read only once, under `tfdistkit run`: all ranks run the whole text as `python` would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import heed_signals

from tfdistkit.cli.main import main

LOOK = """
'The docstring.'
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__, "doc": __doc__, "spec": repr(__spec__),
    "package": __package__, "cached": __cached__, "loader": getattr(__loader__, "__name__", type(__loader__).__name__),
    "globals": sorted(globals()), "main": sys.modules["__main__"].__dict__ is globals(), "read": sys.stdin.read(),
}))
"""
RUN = f"{sys.executable} -m tfdistkit run -np"
# Long enough to fill a pipe several times.
FILL = "# " + "x" * 100 + "\n"
# How a shell hands a script over: what follows the command, and what stands before it.
WAYS = {
    "stdin": ("", "- a < train.py"),
    "pipe to stdin": ("cat train.py |", "- a"),
    "/dev/stdin": ("cat train.py |", "/dev/stdin a"),
    "a file at /dev/stdin": ("", "/dev/stdin a < train.py"),
    "process substitution": ("", "<(cat train.py) a < /dev/null"),
    "a named pipe": ("(cat train.py > fifo &);", "fifo a < /dev/null"),
}


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        preexec_fn=heed_signals,  # noqa: PLW1509
    )


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_run_what_python_would_run(tmp_path: Path, way: str) -> None:
    before, after = WAYS[way]
    (tmp_path / "train.py").write_text(LOOK + 3000 * FILL + "print('whole')\n")
    os.mkfifo(tmp_path / "fifo")
    plain = shell(f"{before} {sys.executable} {after}", tmp_path)
    ours = shell(f"{before} {RUN} 2 {after}", tmp_path)
    name = after.split(" a")[0] if "<(" not in after else "/dev/fd/63"
    assert (ours.returncode, ours.stderr) == (0, f"tfdistkit: starting 2 workers on this machine: {name}\n")
    looked, whole = plain.stdout.splitlines()
    expected = json.loads(looked)
    # Several workers read nothing.
    for rank in (0, 1):
        lines = re.findall(rf"(?m)^\[{rank}\] (.*)$", ours.stdout)
        assert lines[1] == whole == "whole"
        assert json.loads(lines[0]) == {**expected, "read": ""}
    assert [path.name for path in tmp_path.glob("tfdistkit-*")] == []


def test_a_failure_shows_source_lines_of_a_piped_script(tmp_path: Path) -> None:
    text = "import inspect, os\ndef f():\n    raise ValueError(os.environ['TFDISTKIT_RANK'])\n"
    # AutoGraph looks for the source of a function, too.
    (tmp_path / "train.py").write_text(f"{text}assert inspect.getsource(f).startswith('def f'), f\nf()\n")
    ended = shell(f"{RUN} 2 --log-dir logs - < train.py", tmp_path)
    assert ended.returncode == 1
    assert "    raise ValueError(os.environ['TFDISTKIT_RANK'])" in ended.stderr
    kept = tmp_path / "logs" / "script.py"
    assert f'File "{kept}", line 3, in f' in ended.stderr
    assert kept.read_text() == (tmp_path / "train.py").read_text()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_restart_runs_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nsys.exit(os.environ['TFDISTKIT_ATTEMPT'] == '0')\n")
    ended = shell(f"cat train.py | {RUN} 2 --max-restarts 1 -", tmp_path)
    assert ended.returncode == 0 and "attempt 1" in ended.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-H localhost:2 - < train.py", "comes from a pipe, which is on this machine only"),
        ("-H localhost:2 <(cat train.py)", "comes from a pipe, which is on this machine only"),
        ("--backend slurm -np 2 - < train.py", "comes from a pipe, which is on this machine only"),
        ("-np 2 no-such-pipe", "there is no script 'no-such-pipe'"),
        ("-np 2 /dev/zero", "The script must be at most 64 MiB."),
    ],
)
def test_invalid_scripts_are_rejected(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('this must not run')")
    ended = shell(f"{sys.executable} -m tfdistkit run {line}", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "") and message in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_terminal_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    controller, terminal = os.openpty()
    try:
        assert main(["run", "-np", "2", os.ttyname(terminal)]) == 2
    finally:
        os.close(controller)
        os.close(terminal)
    assert "Redirect a file into it: tfdistkit run -np 2 - < script.py" in capsys.readouterr().err


def test_a_dry_run_reads_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("the text\n")
    ended = shell(f"({RUN} 2 --dry-run - a; cat) < train.py", tmp_path)
    assert ended.returncode == 0 and ended.stdout.endswith("the text\n") and " - a" in ended.stdout


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_programs_of_several_modules(tmp_path: Path, kind: str) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import sys, beside\nprint(sys.argv, beside.name)\n")
    (tmp_path / "app" / "beside.py").write_text("name = __name__\n")
    name = "app"
    if kind == "zip":
        shell(f"{sys.executable} -m zipapp app -o app.pyz", tmp_path)
        name = "app.pyz"
    ended = shell(f"{RUN} 2 {name} --x", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, f"tfdistkit: starting 2 workers on this machine: {name}\n")
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] ['{name}', '--x'] beside" for rank in (0, 1)]
