"""Where ranks are, as they tell each other."""

from __future__ import annotations

import numpy as np
import pytest

from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow


def test_ranks_in_other_epochs_or_calls_are_named() -> None:
    from tfdistkit.strategies import positions

    one, other = positions.Position("predict"), positions.Position("predict")
    positions.require_equal(np.stack([one.row()] * 2))
    with pytest.raises(UnsupportedError, match="rank 0: `predict` number 1, at its begin; rank 1: `predict` number 2"):
        positions.require_equal(np.stack([one.row(), other.row()]))
    with pytest.raises(UnsupportedError, match="rank 1: `predict` number 2, epoch 1 of it"):
        positions.require_equal(np.stack([one.row(), other.next_epoch().row()]))
    assert positions.here() == "`predict` number 2, epoch 1 of it"
