"""Compares the results of a strategy with those of one process, within the tolerances of docs/exactness.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from parity.comparing import of_numbers, of_tensors

from fuzz.pool import Outcome

TOLERANCE = 1e-6
# Momenta are sums of gradients that cancel out near an optimum; they are rounded like the gradients.
LOOSER_FOR_OPTIMIZER_STATE = 10

# Of the errors of `strategies.step_check`.
_OF_STEP_CHECK = ("must have the gradients of one process", "must write the state of one process")
EQUAL, ROUNDING, REFUSED, INVALID, WRONG = "equal", "rounding", "refused", "invalid", "wrong"
# A program that did not answer, and was equal in fresh processes: reported with its stacks, for it can't be repeated.
HUNG_ONCE = "hung once"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one program under one strategy.

    Args:
        kind: One of the words above.
        what: A short text; programs that fail alike have the same one.
        details: What differs by how much, or the traceback.
    """

    kind: str
    what: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def _of(measure: Any, expected: Any, found: Any) -> float:
    """As `measure`, where what is not finite in one process has to be as it is there."""
    expected, found = np.asarray(expected), np.asarray(found)
    if expected.dtype.kind not in "fc" or expected.shape != found.shape:
        return measure(expected, found)
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], found[~finite], equal_nan=True):
        return float("inf")
    return measure(expected[finite], found[finite]) if finite.any() else 0.0


def differences(expected: Outcome, found: Outcome) -> dict[str, float]:
    """Returns by name the difference of each value from the expected one; infinity for a missing or extra value."""
    result = {}
    for act in {**expected.values, **found.values}:
        wanted, got = expected.values.get(act, {}), found.values.get(act, {})
        for name in {**wanted, **got}:
            missing = name not in wanted or name not in got
            result[f"{act} {name}"] = float("inf") if missing else _of(of_numbers, wanted[name], got[name])
    for name in {**expected.arrays, **found.arrays}:
        missing = name not in expected.arrays or name not in found.arrays
        if missing and "_state" in name and not found.arrays.get(name, np.ones(1)).any():
            continue  # Under a strategy an optimizer is built for all variables, even without gradients.
        result[name] = float("inf") if missing else _of(of_tensors, expected.arrays[name], found.arrays[name])
    return result


def _limit(name: str) -> float:
    return TOLERANCE * (LOOSER_FOR_OPTIMIZER_STATE if "_state" in name else 1)


def too_far(expected: Outcome, found: Outcome) -> dict[str, float]:
    """Returns the differences above the tolerances."""
    return {name: value for name, value in differences(expected, found).items() if not value <= _limit(name)}


def between_ranks(ranks: list[Outcome]) -> list[str]:
    """Returns the names of values that are not bitwise equal on all ranks."""
    first, names = ranks[0], []
    for other in ranks[1:]:
        names += [act for act in first.values if repr(first.values[act]) != repr(other.values.get(act))]
        for name, tensor in first.arrays.items():
            if name not in other.arrays or other.arrays[name].tobytes() != tensor.tobytes():
                names.append(name)
    return list(dict.fromkeys(names))


def _error_verdict(ranks: list[Outcome]) -> Verdict | None:
    errors = [o.error for o in ranks if o.error]
    if not errors:
        return None
    details = {f"rank {i}": o.error for i, o in enumerate(ranks)}
    worst = next((e for e in errors if not e["ours"] and e["type"] not in ("Hang", "Died")), None)
    worst = worst or next((e for e in errors if not e["ours"]), None)
    if worst is not None:
        return Verdict(WRONG, f"{worst['type']}: {_first_words(worst['message'])}", details)
    if len(errors) < len(ranks):
        return Verdict(WRONG, f"refused on some ranks only: {_first_words(errors[0]['message'])}", details)
    if any(words in errors[0]["message"] for words in _OF_STEP_CHECK):  # No program is inexact: the step or check is.
        return Verdict(WRONG, f"the check of the first step: {_first_words(errors[0]['message'])}", details)
    return Verdict(REFUSED, f"{errors[0]['type']}: {_first_words(errors[0]['message'])}", details)


def _first_words(message: str) -> str:
    return " ".join(message.split())[:90]


def judge(expected: Outcome, ranks: list[Outcome]) -> Verdict:
    """Judges one program under one strategy.

    Args:
        expected: What one process gave.
        ranks: What each rank gave.
    """
    if expected.error:
        return Verdict(
            INVALID, f"{expected.error['type']}: {_first_words(expected.error['message'])}", {"plain": expected.error}
        )
    error = _error_verdict(ranks)
    if error is not None:
        return error
    apart = between_ranks(ranks)
    if apart:
        return Verdict(WRONG, f"ranks differ: {_kinds(apart)}", {"ranks differ": apart})
    far = too_far(expected, ranks[0])
    if far:
        return Verdict(WRONG, f"differs from one process: {_kinds(far)}", {"differs": far})
    return Verdict(EQUAL)


def _kinds(names: Any) -> str:
    """Groups differences: weights, state of optimizers, logs by name."""
    kinds = {name.partition(".")[0] if "." in name else name for name in names}
    return ", ".join(sorted(kinds))[:160]
