"""Checks of arguments: one function for each kind, so that all errors of a kind read alike."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TypeGuard

from tfdistkit.errors import OptionError, explain, nearest


def require_bool(name: str, value: object) -> bool:
    """Returns an argument that is True or False.

    Args:
        name: The name of the argument, as the user wrote it.
        value: What was given.

    Raises:
        OptionError: (a ValueError) if it is anything else.
    """
    if not isinstance(value, bool):
        raise OptionError(explain(f"`{name}` must be True or False.", received=f"{name}={value!r}"))
    return value


def is_integer(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def require_integer(name: str, value: object, at_least: int = 1, at_most: int | None = None) -> int:
    """Returns an argument that is an integer of Python or NumPy.

    Args:
        name: The name of the argument.
        value: What was given.
        at_least: The smallest allowed integer.
        at_most: The largest allowed integer; None for no limit.

    Raises:
        OptionError: (a ValueError) if it is not an integer, or out of bounds. True and False are not integers.
    """
    if not is_integer(value) or value < at_least or (at_most is not None and value > at_most):
        bounds = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise OptionError(explain(f"`{name}` must be an integer {bounds}.", received=f"{name}={value!r}"))
    return int(value)


def require_positive(name: str, value: object, unit: str = "") -> float:
    """Returns an argument that is a finite number above 0.

    Args:
        name: The name of the argument.
        value: What was given.
        unit: What it counts, such as `seconds`.

    Raises:
        OptionError: (a ValueError) if it is not such a number.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not value > 0 or not math.isfinite(value):  # type: ignore[operator, arg-type]
        what = f"a positive number of {unit}" if unit else "a positive number"
        raise OptionError(explain(f"`{name}` must be {what}.", received=f"{name}={value!r}"))
    return float(value)  # type: ignore[arg-type]


def require_choice(name: str, value: object, choices: Sequence[str], do: str | None = None) -> str:
    """Returns an argument that is one of several words.

    Args:
        name: The name of the argument.
        value: What was given.
        choices: The words.
        do: The fix for another value, as an imperative sentence.

    Raises:
        OptionError: (a ValueError) if it is another value; names the nearest choice.
    """
    if value not in choices:
        what = f"`{name}` must be one of: {', '.join(choices)}.{nearest(str(value), list(choices))}"
        raise OptionError(explain(what, received=f"{name}={value!r}", do=do))
    return str(value)
