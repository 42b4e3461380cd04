"""Positions of ranks in calls and epochs, and their comparison."""

from __future__ import annotations

import numpy as np
import pytest

from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow


class _Group:
    """A fake strategy."""


def test_ranks_in_other_epochs_or_calls_are_named() -> None:
    from tfdistkit.strategies.consistency import call_positions

    group, part = _Group(), _Group()
    call_positions.Position(part, "predict")  # A call of another group of ranks does not count.
    one, other = call_positions.Position(group, "predict"), call_positions.Position(group, "predict")
    one.require_equal(np.stack([one.row()] * 2))
    with pytest.raises(UnsupportedError, match="rank 0: `predict` number 1, at its start; rank 1: `predict` number 2"):
        one.require_equal(np.stack([one.row(), other.row()]))
    with pytest.raises(UnsupportedError, match="rank 1: `predict` number 2, epoch 1 of it"):
        one.require_equal(np.stack([one.row(), other.next_epoch().row()]))
    assert call_positions.here() == "`predict` number 2, epoch 1 of it"
    again = call_positions.Position(
        group, "predict"
    )  # The error is on all ranks: those that go on have equal positions.
    with pytest.raises(UnsupportedError, match="rank 0: `predict` number 1, at its start"):
        again.require_equal(np.stack([again.row(), other.row()]))
