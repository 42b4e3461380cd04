"""docs/error_texts.md has the error texts of the package, as they are now."""

from __future__ import annotations

import collections

from error_texts import PAGE, page, texts


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python tests/house/error_texts.py"


def test_a_text_stands_in_one_place() -> None:
    times = collections.Counter((text.what, text.fix) for text in texts())
    assert [one for one, number in times.items() if number > 1] == []


def test_what_must_hold_is_a_sentence() -> None:
    endings = (".", "}", "?", "s")  # What a function or a number of seconds ends cannot be read here.
    assert [text.what for text in texts() if text.what and not text.what.endswith(endings)] == []
