"""The lists of `tiers` name files and cases that exist, so that a renamed one does not leave the quick tests."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("lists", [tiers._SOME, tiers._LONG_TESTS, tiers._THOROUGH], ids=["some", "long", "thorough"])
def test_words_are_of_a_test(lists: dict[str, tuple[str, ...]]) -> None:
    for file, word in [(file, word) for file, words in lists.items() for word in words]:
        text = (TESTS / file).read_text()
        found = re.split(r"[\[\]-]", word.strip("[]"))[0]
        assert found in text or found == "horovod" and "ENGINES" in text, word  # Engines are of `rank_jobs`.


def test_each_slow_file_has_its_turn() -> None:
    files = [path.relative_to(TESTS).as_posix() for path in TESTS.glob("*/test_*.py")]
    turns = [{file for file in files if tiers.is_of_turn(file, turn)} for turn in range(tiers.TURNS)]
    assert set.union(*turns) == set(files)
    assert {"parity/test_exactness.py", "fuzz/test_fuzz.py"} <= set.intersection(*turns)
    assert all(0.7 / tiers.TURNS < len(turn) / len(files) < 1.4 / tiers.TURNS for turn in turns)
