"""Parses frequencies in steps, epochs or seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import is_integer

# In seconds.
_TIMES = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
_WORDS = re.compile(r"(\d+(?:\.\d+)?)\s*(step|epoch|second|minute|hour)s?")


@dataclass(frozen=True)
class Frequency:
    """An interval in a unit.

    Args:
        amount: The number of units between two events.
        unit: `"steps"`, `"epochs"` or `"seconds"`.
    """

    amount: float
    unit: str


def frequency_of(name: str, given: Any) -> Frequency:
    """Parses the frequency that the user gave.

    Args:
        name: The name of the argument, for the error.
        given: A number of steps, `"epoch"`, or a text such as `"500 steps"`, `"2 epochs"`, `"10 minutes"`.

    Raises:
        OptionError: if it is something else.
    """
    if is_integer(given) and given > 0:
        return Frequency(int(given), "steps")
    if given == "epoch":
        return Frequency(1, "epochs")
    match = _WORDS.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is not None and float(match[1]) > 0:
        amount, unit = float(match[1]), match[2]
        if unit in _TIMES:
            return Frequency(amount * _TIMES[unit], "seconds")
        if amount.is_integer():
            return Frequency(int(amount), f"{unit}s")
    raise OptionError(
        explain(
            f'`{name}` must be "epoch", a positive number of steps, or a text such as "500 steps", "2 epochs" or '
            '"10 minutes".',
            received=f"{name}={given!r}",
        )
    )
