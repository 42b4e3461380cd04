"""No file contains a path of a machine, and files and functions stay within their length limits."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = re.compile(r"\.(?!ci$|github$)|__pycache__$|build$|dist$|runs$|logs$|.*\.egg-info$")
# Split, so that this file does not match.
MACHINE_PATHS = re.compile("|".join(["/" + "work/", "/" + "root/", "/tmp/" + "v/", "/" + r"home/\w", "/" + "opt/"]))
LONGEST_FILE = 400
# Private names of Keras and TensorFlow stay in one place, so that only it breaks with new versions.
LONGER_FILES = {"tfdistkit/keras_adapter/private_api.py": 555, "tfdistkit/keras_adapter/private_names.py": 472}
LONGEST_FUNCTION = 60


def files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not BUILT.match(name)]
        # In a worktree `.git` is a file that names a path.
        yield from (Path(folder, name) for name in sorted(names) if name != ".git")


TEXTS = [file for file in files() if file.suffix in ("", ".py", ".md", ".cfg", ".toml", ".txt", ".yml", ".yaml", ".sh")]
SOURCES = [file for file in TEXTS if file.suffix == ".py"]


def test_files_are_found() -> None:
    names = {str(file.relative_to(ROOT)) for file in TEXTS}
    assert {"setup.cfg", "Makefile", ".ci/run", "tfdistkit/__init__.py", "tests/house/test_files.py"} <= names


def test_no_machine_paths() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in TEXTS
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATHS.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_stay_short(file: Path) -> None:
    length = len(file.read_text().splitlines())
    assert length <= LONGER_FILES.get(str(file.relative_to(ROOT)), LONGEST_FILE), f"{length} lines: split the file"


def _first_line(function: ast.FunctionDef) -> int:
    """Returns the line where the code begins: docstrings do not count."""
    return (function.body[0].end_lineno or 0) if ast.get_docstring(function) else function.lineno


def test_functions_stay_short() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for file in SOURCES
        if file.is_relative_to(ROOT / "tfdistkit")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - _first_line(node) >= LONGEST_FUNCTION
    ]
    assert not long, "\n".join(long)
