"""The lists of `tiers` name files and cases that exist, so that a renamed one does not leave the quick tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
from parity.cases import CASES

TESTS = Path(__file__).parents[1]
FILES = sorted(
    {*tiers._SOME, *tiers._LONG_TESTS, *tiers._THOROUGH, *(f"parallel/{name}.py" for name in tiers._QUICK_JOBS)}
)


@pytest.mark.parametrize("file", FILES)
def test_files_exist(file: str) -> None:
    assert (TESTS / file).exists()


def test_cases_exist() -> None:
    assert set(tiers.QUICK_CASES) - set(CASES) == set()


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    """The names of all tests of these files, by file, as pytest makes them."""
    lists = [str(TESTS / file) for file in FILES]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", *lists]
    # Where a part of the slow files is run, the lists are of all of them.
    variables = {name: value for name, value in os.environ.items() if name != "TFDISTKIT_TEST_TURN"}
    told = subprocess.run(
        command, cwd=TESTS.parent, env=variables, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    found: dict[str, list[str]] = {}
    for file, _, name in (line.partition("::") for line in told.splitlines()):
        found.setdefault(file.removeprefix("tests/"), []).append(name)
    return found


@pytest.mark.parametrize("lists", [tiers._SOME, tiers._LONG_TESTS, tiers._THOROUGH], ids=["some", "long", "thorough"])
def test_words_are_of_a_test(lists: dict[str, tuple[str, ...]], names: dict[str, list[str]]) -> None:
    words = [(file, word) for file, words in lists.items() for word in words]
    assert [(file, word) for file, word in words if not any(word in name for name in names[file])] == []


def test_each_slow_file_has_its_turn() -> None:
    files = [path.relative_to(TESTS).as_posix() for path in TESTS.glob("*/test_*.py")]
    turns = [{file for file in files if tiers.is_of_turn(file, turn)} for turn in range(tiers.TURNS)]
    assert set.union(*turns) == set(files)
    assert {"parity/test_exactness.py", "fuzz/test_fuzz.py"} <= set.intersection(*turns)
    assert all(0.7 / tiers.TURNS < len(turn) / len(files) < 1.4 / tiers.TURNS for turn in turns)
