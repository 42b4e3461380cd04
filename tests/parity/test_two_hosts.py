"""Three ranks of `multiworker` on two hosts, sums within the hosts first, against one process on the same batches."""

from __future__ import annotations

from typing import Any

import pytest

from parity.cases import CASES
from parity.comparing import differences, rank_differences
from parity.tolerances import tolerance_of

# One of each kind that has the same results with any number of replicas.
NAMES = ("dense_sgd", "masks_103", "execution_3_embedding", "loop_average_loss")
MORE = (
    *("loss_scale_clip", "global_clipnorm", "ema", "accumulation", "embedding", "sample_weight", "two_outputs"),
    *("scalar_loss_1", "eager", "own_train_step"),
)

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("case", [*NAMES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)])
@pytest.mark.parametrize("engine", ["multiworker_hierarchical"])
def test_equals_one_process(runs: Any, engine: str, case: str) -> None:
    runs.start(engine)  # In parallel with the reference.
    (expected,), ranks = runs.records("one", case), runs.records(engine, case)
    for record in (expected, *ranks):
        assert record.error is None, record.values["traceback"]
    assert rank_differences(ranks) == [], "the ranks differ"
    tolerance = tolerance_of(CASES[case], expected.values["keras"])
    # Momenta are looser, as for two ranks.
    limits = {name: tolerance * (10 if "optimizer" in name else 1) for name in differences(expected, ranks[0])}
    too_far = {name: value for name, value in differences(expected, ranks[0]).items() if value > limits[name]}
    assert not too_far, f"{engine} differs from one process: {too_far}"
