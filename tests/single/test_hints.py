"""Commands of users of other launchers: they work, or the error proposes the whole command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tfdistkit.cli.main import main
from tfdistkit.cli.run.options import parse


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "app/__main__.py", "package/__init__.py", "package/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('this must not run')")


@pytest.mark.parametrize(
    "words", ["-np 3", "-np=3", "-n 3", "-n3", "--num-proc 3", "--nproc=3", "--nproc-per-node 3", "--nproc_per_node=3"]
)
def test_all_spellings_of_the_number_of_workers(words: str) -> None:
    options = parse([*words.split(), "train.py", "-np", "9"])
    assert (options.np, options.program) == (3, ("train.py", "-np", "9"))


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("-np 2 train.py --lr 1", "run -np 2 train.py --lr 1"),
        ("train.py", "run -np 2 train.py"),
        ("train.py --epochs 3 -np 4", "run -np 4 train.py --epochs 3"),
        ("train.py --num_processes=4 'a b'", "run -np 4 train.py 'a b'"),
        ("train", "run -np 2 train.py"),
        ("app --x", "run -np 2 app --x"),
        ("train.pyz", "run -np 2 train.pyz"),
        ("-", "run -np 2 -"),
        ("-n4 train.py", "run -n4 train.py"),
        ("--np 4 train.py --np 5", "run -np 4 train.py --np 5"),
        ("--nproc_per_node=2 train.py", "run --nproc_per_node=2 train.py"),
        ("-H a:1 train.py", "run -H a:1 train.py"),
        ("-v train.py", "run -np 2 -v train.py"),
        ("python train.py", "run -np 2 train.py"),
        ("/usr/bin/python3.11 -m package.train", "run -np 2 -m package.train"),
        ("3 train.py", "run -np 3 train.py"),
        ("-m package.train", "run -np 2 -m package.train"),
        ("launch train.py", "run -np 2 train.py"),
        ("launch -np 3 train.py", "run -np 3 train.py"),
        ("horovodrun -np 2 -H localhost:2 python train.py", "run -np 2 -H localhost:2 train.py"),
        ("-np 2", "run -np 2 script.py"),
        ("-np", "run -np 2 script.py"),
        ("manifest --image x", "k8s manifest --image x"),
        ("version", "--version"),
        ("run train.py", "run -np 2 train.py"),
        ("run train.py -np 3 --lr 1", "run -np 3 train.py --lr 1"),
        ("run -v train.py", "run -np 2 -v train.py"),
        ("run python train.py --x", "run -np 2 train.py --x"),
        ("run -np 2 python3 -u -B train.py --x", "run -np 2 train.py --x"),
        ("run -np 2 python train.py --x", "run -np 2 train.py --x"),
        ("run 3 train.py", "run -np 3 train.py"),
        ("run --np 3 train.py", "run -np 3 train.py"),
        ("run --num_processes=3 -v train.py --workers 5", "run -np 3 -v train.py --workers 5"),
        ("run -np 3 package.train", "run -np 3 -m package.train"),
        ("run -np 3 -m train.py", "run -np 3 train.py"),
    ],
)
def test_the_error_proposes_a_command(typed: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(shlex.split(typed))
    except SystemExit as leave:
        code = int(leave.code or 0)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert f"Type: tfdistkit {right}\n" in captured.err


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("run -np2 train.py", "put a space before the number: `-np 2`"),
        ("run -np train.py", "such as `-np 2` or `-np 2:4`, received 'train.py'"),
        ("run -np 2 package", "'package' is a folder without a __main__.py"),
        ("run -np 2 ''", "the name of the script is empty"),
        ("run --log_dir x -np 2 train.py", "Did you mean '--log-dir'?"),
    ],
)
def test_errors_with_a_hint(typed: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(shlex.split(typed))
    assert told in capsys.readouterr().err


def test_the_common_options_fit_on_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as leave:
            main(["run", option])
        assert leave.value.code == 0
        told.append(capsys.readouterr().out)
    common, whole = told
    assert len(common.splitlines()) <= 40
    assert "--help-all" in common and "-np N" in common and "--hostfile" not in common
    assert all(one in whole for one in ("--hostfile", "--sbatch-arg", "--threads-per-worker", "exit codes:"))
