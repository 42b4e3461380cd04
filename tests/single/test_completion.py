"""Completion on TAB: in bash itself; in zsh and fish by the variables that they set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfdistkit.cli.main import COMMANDS

SCRIPT = """#!{python}
import atexit, sys
from tfdistkit.cli.main import main
sys.exit(main())
"""
# Bash's steps on TAB, without a terminal.
ASK = """
eval "$(register-python-argcomplete tfdistkit)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete tfdistkit
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Returns variables of a shell that finds the command, in a folder with a script."""
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "tfdistkit"
    command.write_text(SCRIPT.format(python=sys.executable))
    command.chmod(0o700)
    path = os.pathsep.join([str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = str(Path(__file__).parents[2])
    return {**os.environ, "PATH": path, "PYTHONPATH": modules}


LINES = [
    ("tfdistkit ", {*COMMANDS, "--help", "--version"}),
    *((f"tfdistkit {name} --hel", {"--help"} | ({"--help-all"} if name == "run" else set())) for name in COMMANDS),
    ("tfdistkit doc", {"doctor"}),
    ("tfdistkit run --ba", {"--backend", "--backup-before"}),
    ("tfdistkit run --backend ", {"local", "horovod", "mpi", "ray", "slurm"}),
    ("tfdistkit run -np 2 --backend h", {"horovod"}),
    ("tfdistkit run -np 2 tr", {"train.py"}),
    ("tfdistkit run -np 2 train.py --ba", {""}),
    ("tfdistkit k8s manifest --kind ", {"job", "jobset", "tfjob"}),
    ("tfdistkit horovod ", {"install", "check", "--help"}),
]


@pytest.mark.parametrize(("line", "offered"), LINES)
def test_in_bash(environment: dict[str, str], tmp_path: Path, line: str, offered: set[str]) -> None:
    assert shutil.which("bash") is not None
    asked = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", line],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert {word.strip() for word in asked.stdout.split("\n")} - {""} == offered - {""}, asked.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_in_other_shells(environment: dict[str, str], tmp_path: Path, shell: str) -> None:
    register = ["register-python-argcomplete", "--shell", shell, "tfdistkit"]
    code = subprocess.run(register, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "tfdistkit" in code and "_ARGCOMPLETE" in code
    line, answer = "tfdistkit run --backe", tmp_path / "answer"
    told = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "", "_ARGCOMPLETE": "1"}
    told |= {"_ARGCOMPLETE_SHELL": shell, "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    subprocess.run(["tfdistkit"], env={**environment, **told}, cwd=tmp_path, timeout=60, check=True)
    assert answer.read_text().startswith("--backend")


def test_nothing_heavy_is_loaded(environment: dict[str, str], tmp_path: Path) -> None:
    look = "heavy = {'tensorflow', 'keras', 'numpy', 'horovod', 'cloudpickle', 'asyncio'}"
    look += "\natexit.register(lambda: print(*(heavy & set(sys.modules)), file=sys.stderr))\nos_exit = __import__('os')"
    look += "\nos_exit._exit = lambda code: sys.exit(code)\n"  # argcomplete exits by it
    command = tmp_path / "bin" / "tfdistkit"
    command.write_text(command.read_text().replace("import atexit, sys\n", f"import atexit, sys\n{look}"))
    line = "tfdistkit run --backe"
    told = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash"}
    told["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "answer")
    asked = subprocess.run(
        ["tfdistkit"], env={**environment, **told}, cwd=tmp_path, timeout=60, capture_output=True, text=True
    )
    assert (tmp_path / "answer").read_text().strip() == "--backend"
    assert (asked.stdout, asked.stderr.strip()) == ("", "")


def test_without_argcomplete_nothing_is_proposed(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "argcomplete.py").write_text("raise ImportError('not installed')")
    modules = os.pathsep.join([str(tmp_path / "hidden"), environment["PYTHONPATH"]])
    told = {"PYTHONPATH": modules, "COMP_LINE": "tfdistkit r", "COMP_POINT": "11", "_ARGCOMPLETE": "1"}
    asked = subprocess.run(
        ["tfdistkit"], env={**environment, **told}, cwd=tmp_path, timeout=60, capture_output=True, text=True
    )
    assert asked.returncode == 2 and "Traceback" not in asked.stderr
