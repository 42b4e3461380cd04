"""`tfdistkit.data` with parameter-server workers that read their own data."""

from __future__ import annotations

import pytest
from coordinator_setup import ROWS, SETUP, STEPS, last_report

pytestmark = [pytest.mark.tensorflow, pytest.mark.parametrize("engine", ["parameter_server"])]

READ = """
    def of_worker(context):
        place = dict(num_shards=context.num_input_pipelines, index=context.input_pipeline_id)
        return tfdistkit.data.from_arrays((x, y), shuffle=True, seed=3, **place).batch(BATCH)

    own = train(plain(), strategy.distribute_datasets_from_function(of_worker))
    given = train(plain(), tfdistkit.data.from_arrays((x, y), shuffle=True).batch(BATCH))
    report(own=own, given=given)
"""


@pytest.mark.part(READ, setup=SETUP)
def test_each_element_once_whoever_reads(printed: list[str]) -> None:
    seen = last_report(printed)
    for how in ("own", "given"):
        assert seen[how]["used"] == [3] * ROWS
        assert seen[how]["seen"] == [ROWS] * 3
    assert seen["given"]["steps"] == 3 * STEPS
