"""The links of the pages point to existing files and headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_files import ROOT, TEXTS

PAGES = [file for file in TEXTS if file.suffix == ".md" and not file.is_relative_to(ROOT / "tests")]


def prose(page: Path) -> str:
    """Returns a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings: lower case, dashes for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not link.startswith("https://")]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_pages_are_found() -> None:
    assert {ROOT / "README.md", ROOT / "docs" / "strategies" / "horovod.md"} <= set(PAGES)
