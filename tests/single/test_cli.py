"""The command line: errors are reported before anything starts, with the next step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tfdistkit
from tfdistkit.cli.main import main
from tfdistkit.cli.run.options import parse


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('this must not run')")
    (tmp_path / "notes.ipynb").write_text('{"cells": []}')
    (tmp_path / "start.sh").write_text("#!/usr/bin/env bash\npython train.py\n")
    return "train.py"


def test_help_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "  run " in capsys.readouterr().out
    assert main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfdistkit {tfdistkit.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "there is no command 'rnu'. Did you mean 'run'?"),
        (["fly"], "Expected one of: run, ps, "),
        (["train.py"], "Type: tfdistkit run -np 2 train.py\n"),
    ],
)
def test_a_wrong_command(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "2"], "no script is given"),
        (["train.py"], "-np, the number of workers, is missing"),
        (["train.py", "-np", "2"], "-np, the number of workers, is missing. Put it before the script"),
        (["-np", "two", "train.py"], "expected a number of workers, such as `-np 2` or `-np 2:4`, received 'two'"),
        (["-np", "2", "tain.py"], "there is no script 'tain.py'. Did you mean 'train.py'?"),
        (["-np", "2", "python", "train.py"], "Type: tfdistkit run -np 2 train.py\n"),
        (["-np", "2", "."], "'.' is a folder without a __main__.py"),
        (["-np", "2", "--lgo-dir", "train.py"], "there is no option '--lgo-dir'. Did you mean '--log-dir'?"),
        (["-np", "2", "--log", "d", "train.py"], "there is no option '--log'"),
        (["-np", "2", "-m", "no_such_module_here"], "there is no module 'no_such_module_here'"),
        (["-np", "2", "-m", "no_such.py"], "-m takes a module's name, without .py"),
        (["-np", "2", "--env", "A", "train.py"], "expected NAME=VALUE, such as A=1, received 'A'"),
        (["-np", "2", "--timeout", "soon", "train.py"], "invalid float value: 'soon'"),
        (["--ps", "some", "-np", "2", "train.py"], "argument --ps: invalid int value: 'some'"),
        (["--ps", "2", "train.py"], "-np, the number of workers, is missing"),
        (["--ps", "-np", "2", "train.py"], "argument --ps: expected one argument"),
        (["-np", "2", "--max-restart", "1", "train.py"], "Did you mean '--max-restarts'?"),
        (["-np", "0:2", "train.py"], "MIN of `-np MIN:MAX` must be >= 1. Received: -np 0:2"),
        (["-np", "4:2", "train.py"], "MIN of `-np MIN:MAX` must be at most MAX. Received: -np 4:2"),
        (["-np", "2:", "train.py"], "expected a number of workers, such as `-np 2` or `-np 2:4`, received '2:'"),
        (["--min-np", "2", "--max-np", "4", "train.py"], "Write both bounds in one: -np MIN:MAX"),
        (["-np", "2", "--cool-down", "9", "train.py"], "--cool-down requires -np MIN:MAX"),
        (["-np", "2:4", "--cool-down", "-9", "train.py"], "`--cool-down` must be a positive number of seconds"),
        (["-np", "2:4", "--wait", "0", "train.py"], "`--wait` must be a positive number of seconds"),
        (["-np", "2", "--host-discovery-script", "x", "train.py"], "--host-discovery-script requires -np MIN:MAX"),
        (["-np", "1:2", "--host-discovery-script", "nowhere", "train.py"], "Received: nowhere, which does not exist"),
        (["-np", "1:2", "--host-discovery-script", "train.py", "train.py"], "which is not executable (chmod +x)"),
        (["-np", "1:2", "--host-discovery-script", "x", "-H", "a:2", "train.py"], "it must be used without -H"),
        (["-np", "2", "--preemption-file", "train.py", "train.py"], "train.py, which exists"),
        (["-np", "2", "--preemption-file", "no/notice", "train.py"], "whose folder does not exist"),
        (["-np", "2", "--preemption-file", "", "train.py"], "argument --preemption-file: invalid path value: ''"),
        (["-np", "2", "--preemption-file", ".", "train.py"], "which is a folder"),
        (["-np", "2", "--log-dir", "", "train.py"], "argument --log-dir: invalid path value: ''"),
        (["-np", "2", "--nproc-per-node", "3", "train.py"], "are the same without SLURM"),
        (["-np", "2", "notes.ipynb"], "'notes.ipynb' is a notebook"),
        (["-np", "2", "start.sh"], "'start.sh' is not Python"),
        (["--backend", "slurm", "-np", "2:4", "train.py"], "-np must be one number with --backend slurm"),
        (["--backend", "slurm", "-np", "2", "--restart-window", "9", "train.py"], "--restart-window does not work"),
        (
            ["--backend", "slurm", "--nnodes", "1:2", "-np", "2", "train.py"],
            "workers follows from --nnodes MIN:MAX",
        ),
        (
            ["--backend", "slurm", "--nnodes", "3:2", "train.py"],
            "and at most MAX. Received: --nnodes 3:2",
        ),
        (
            ["--backend", "slurm", "--nnodes", "0:2", "train.py"],
            "and at most MAX. Received: --nnodes 0:2",
        ),
        (
            ["--backend", "slurm", "--nnodes", "1:2", "--ps", "1", "train.py"],
            "MIN:MAX does not work with --ps",
        ),
        (["--nnodes", "1:2", "--nproc-per-node", "2", "train.py"], "--nnodes MIN:MAX requires SLURM"),
        (["--nnodes", "3:2", "-H", "a,b", "train.py"], "at most MAX. Received: --nnodes 3:2 --nproc-per-node 1"),
        (["--nnodes", "1:2", "--nproc-per-node", "2", "-H", "a,b:3", "train.py"], "--nproc-per-node 2, b:3"),
        (["--reset-limit", "3", "-np", "2:3", "train.py"], "Use --max-restarts N"),
        (["--rdzv_backend=c10d", "-np", "2:3", "train.py"], "chooses their addresses"),
    ],
)
def test_errors_in_the_arguments_of_run(
    script: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["run", *words])
    assert leave.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "See `tfdistkit run --help`." in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "0", "train.py"], "`np` must be an integer >= 1. Received: np=0"),
        (["-np", "-1", "train.py"], "`np` must be an integer >= 1. Received: np=-1"),
        (["-np", "2", "--timeout", "0", "train.py"], "`timeout` must be a positive number of seconds"),
        (["-np", "2", "--threads-per-worker", "0", "train.py"], "`threads_per_worker`"),
        (["-np", "2", "--env", "TF_CONFIG={}", "train.py"], "that the launcher sets for each worker"),
        (["-np", "2", "--ps", "-1", "train.py"], "`ps` must be an integer >= 0. Received: ps=-1"),
        (["-np", "2:4", "--ps", "1", "train.py"], "`-np MIN:MAX` must be used without `--ps`"),
        (["-np", "2:4", "--backend", "mpi", "train.py"], "`-np` must be one number with the backend 'mpi'"),
        (["-np", "3:4", "-H", "localhost:2", "train.py"], "MIN of `-np MIN:MAX` must be at most 2"),
        (["-np", "2", "--restart-window", "0", "train.py"], "`restart_window` must be a positive number of seconds"),
        (["-np", "2", "--max-restarts", "-1", "train.py"], "`max_restarts` must be an integer >= 0"),
        (["-np", "2", "--ps", "1", "--backend", "horovod", "train.py"], "which has no parameter servers"),
        (["-np", "2", "--log-dir", "train.py/logs", "train.py"], "The folder for the logs cannot be used"),
    ],
)
def test_invalid_options_of_run(
    script: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "rest",
    [
        ["--lr", "1"],
        ["-np", "3", "--log-dir", "x"],
        ["--", "a", "--", "b"],
        ["-h"],
        ["--lo"],
        ["-1", "", "a b", "--x=1", "-m"],
        ["train.py"],
    ],
)
def test_arguments_after_the_script_belong_to_it(script: str, rest: list[str]) -> None:
    assert parse(["-np", "2", script, *rest]).program == (script, *rest)
    assert parse(["-np", "2", "--", script, *rest]).program == (script, *rest)
    assert parse(["-np", "2", "-m", "json.tool", *rest]).program == ("-m", "json.tool", *rest)


def test_all_options(script: str) -> None:
    options = parse(
        "--num-proc 3 --env A=1 --env B= --log-dir logs --timeout 1.5 --threads-per-worker 2 --dry-run -v".split()
        + [script]
    )
    assert (options.np, options.env, options.log_dir) == (3, {"A": "1", "B": ""}, Path("logs"))
    assert (options.timeout_s, options.threads_per_worker) == (1.5, 2)
    assert options.is_dry_run and options.is_verbose
    assert (options.ps, options.max_restarts) == (0, 0)
    assert options.hang_timeout_s == 600
    given = [["--hang-timeout", "7"], ["--hang-timeout", "0"], ["-np", "1"]]
    assert [parse(["-np", "2", *words, script]).hang_timeout_s for words in given] == [7, None, None]
    assert parse(["-H", "a:1,b:1", script]).hang_timeout_s == 600
    # Where mpirun starts the ranks, the launcher does not see their progress.
    assert parse(["-H", "a:1,b:1", "--backend", "mpi", script]).hang_timeout_s is None
    options = parse(["--ps", "2", "-np", "4", "--max-restarts", "3", script, "--ps", "9"])
    assert (options.ps, options.np, options.max_restarts, options.program) == (2, 4, 3, (script, "--ps", "9"))


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["ps"], ["logs", "--help"], ["--version"]])
def test_nothing_heavy_is_loaded(words: list[str]) -> None:
    code = (
        "import sys, tfdistkit.cli.main as cli\n"
        f"try: cli.main({words!r})\n"
        "except SystemExit: pass\n"
        "import tfdistkit.cli.run.command\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'horovod', 'cloudpickle', 'psutil', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_python_m_tfdistkit() -> None:
    command = [sys.executable, "-m", "tfdistkit", "rnu"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "") and "Did you mean 'run'?" in ended.stderr


def test_nodes_of_torchrun_are_workers_of_hosts(script: str) -> None:
    found = parse(["--nnodes", "1:2", "--nproc-per-node", "2", "-H", "a,b,c:2", script])
    assert found.elastic is not None and (found.elastic.least, found.elastic.most) == (2, 4)
    assert found.hosts is not None and [one.slots for one in found.hosts.slots] == [2, 2, 2]
    fixed = parse(["--nnodes", "2", "--nproc-per-node", "2", "-H", "a,b", script])
    assert (fixed.np, fixed.elastic) == (4, None)
