"""How far the losses and weights of a case may be from those of one process, relative, by the version of Keras."""

from __future__ import annotations

from parity.case import Case
from tfdistkit.supported import numbers_of

_ROUNDED = (
    "The largest number of a bias is 0.02 in the end, and its rounding error 2e-8. "
    "In float64 the results are within 1e-15."
)
_SMALL_BIAS = (
    "A bias ends near zero, so that its rounding error is larger relative to it. "
    "In float64 the results are within 1e-15."
)
_FEW_ROWS = (
    "The logged loss is that of the last batch, of few rows, and small: the rounding of a prediction is larger "
    "relative to it. "
    "In float64 the results are within 1e-15."
)

# The version of Keras that the limits of the cases are for.
KERAS = (3, 15)

# Cases that need more than their own tolerance on other versions, older or newer: the tolerance, and why.
ON_OTHER_KERAS = {
    **{name: (2e-6, _ROUNDED) for name in ("batch_norm_97", "sync_batch_norm_97")},
    "own_metrics_65": (2e-6, _SMALL_BIAS),
    "own_logs": (5e-6, _FEW_ROWS),
}

# Cases that need more than their own tolerance on some processors.
ON_OTHER_PROCESSORS = {name: (5e-6, _FEW_ROWS) for name in ("own_descent", "inner_steps", "extragradient")}


def tolerance_of(case: Case, version: str) -> float:
    """Returns the tolerance of a case on a version of Keras."""
    tables = [ON_OTHER_PROCESSORS] if numbers_of(version) == KERAS else [ON_OTHER_PROCESSORS, ON_OTHER_KERAS]
    return max(case.tolerance, *(table[case.name][0] for table in tables if case.name in table), 0.0)


def reasons_of(case: Case) -> list[str]:
    """Returns why tolerances of a case are not 1e-6."""
    others = [table[case.name][1] for table in (ON_OTHER_PROCESSORS, ON_OTHER_KERAS) if case.name in table]
    return [reason for reason in (case.reason, *others) if reason]
