"""The lists of `tiers` name files and cases that exist, so that a renamed one does not leave the quick tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiers
from parity.cases import CASES

TESTS = Path(__file__).parents[1]
FILES = [*tiers._SOME, *(f"parallel/{name}.py" for name in tiers._QUICK_JOBS)]


@pytest.mark.parametrize("file", FILES)
def test_files_exist(file: str) -> None:
    assert (TESTS / file).exists()


def test_cases_exist() -> None:
    assert set(tiers.QUICK_CASES) - set(CASES) == set()


@pytest.mark.parametrize("file", tiers._SOME)
def test_words_are_of_a_test(file: str) -> None:
    text = (TESTS / file).read_text()
    for word in tiers._SOME[file]:
        assert re.split(r"[\[\]-]", word.strip("[]"))[0] in text, word
