"""Checks of arguments: what is taken, what is refused, and in which words."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tfdistkit.errors import OptionError
from tfdistkit.validation import require_bool, require_choice, require_integer, require_positive


def test_valid_values_are_accepted() -> None:
    assert require_bool("a", False) is False
    assert require_integer("a", np.int64(3)) == 3 and type(require_integer("a", np.int64(3))) is int
    assert require_integer("a", 0, at_least=0) == 0 and require_integer("a", 5, at_most=5) == 5
    assert require_positive("a", 0.5) == 0.5 and require_positive("a", np.float32(2)) == 2
    assert require_choice("a", "ring", ("auto", "ring")) == "ring"


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: require_bool("sparse", 1), "`sparse` must be True or False. Received: sparse=1."),
        (lambda: require_bool("sparse", None), "`sparse` must be True or False. Received: sparse=None."),
        (lambda: require_integer("np", 0), "`np` must be an integer >= 1. Received: np=0."),
        (lambda: require_integer("np", True), "`np` must be an integer >= 1. Received: np=True."),
        (lambda: require_integer("np", 2.0), "`np` must be an integer >= 1. Received: np=2.0."),
        (lambda: require_integer("np", "2"), "`np` must be an integer >= 1. Received: np='2'."),
        (lambda: require_integer("port", 70000, 1, 65535), "`port` must be an integer from 1 to 65535."),
        (lambda: require_positive("t", 0, "seconds"), "`t` must be a positive number of seconds. Received: t=0."),
        (lambda: require_positive("t", float("nan")), "`t` must be a positive number. Received: t=nan."),
        (lambda: require_positive("t", float("inf")), "`t` must be a positive number. Received: t=inf."),
        (lambda: require_positive("t", True), "`t` must be a positive number. Received: t=True."),
        (lambda: require_positive("t", "2 s"), "`t` must be a positive number. Received: t='2 s'."),
        (lambda: require_choice("how", "rign", ("auto", "ring")), "`how` must be one of: auto, ring. Did you mean"),
        (lambda: require_choice("how", "rign", ("auto", "ring")), "Did you mean 'ring'?"),
        (lambda: require_choice("how", ["ring"], ("auto", "ring")), "Received: how=['ring']"),
    ],
)
def test_wrong_values_are_refused(check: object, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        check()  # type: ignore[operator]
