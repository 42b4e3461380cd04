"""Rows that the ranks of one host exchange over Unix sockets equal those of a collective; late ranks use one."""

from __future__ import annotations

import json

import pytest
from rank_jobs import ENGINES

pytestmark = pytest.mark.tensorflow

EACH_ENGINE = pytest.mark.parametrize("engine", [one for one in ENGINES if "mpi" not in str(one)])

EXCHANGES = """
    import json, time
    import numpy as np
    from unittest import mock
    from tfdistkit.strategies.consistency import row_exchange
    from tfdistkit.strategies.consistency.row_exchange import by_collective, table

    used = []

    def counted(strategy, row):
        used.append(len(row))
        return by_collective(strategy, row)

    equal = []
    with mock.patch.object(row_exchange, "by_collective", counted):
        table(strategy, np.arange(3))  # connects
        for number in range(60):
            late = (number % 20 == 5) * 0.3 * (number // 20 % 2 == rank)
            time.sleep(late)
            row = np.arange(5) * (rank + 1) - number
            equal.append(bool((table(strategy, row) == by_collective(strategy, row)).all()))
        few = len(used)
        long = np.arange(5000) + rank
        equal.append(bool((table(strategy, long) == by_collective(strategy, long)).all()))
    print(json.dumps({"equal": all(equal), "collectives": few, "long": used[few:]}))
"""


@pytest.mark.part(EXCHANGES)
@EACH_ENGINE
def test_rows_are_those_of_a_collective(printed: list[str]) -> None:
    """Three rounds with a late rank use a collective, and so do long rows; the others do not."""
    records = [json.loads(one) for one in printed]
    assert all(one["equal"] and one["long"] == [5000] for one in records)
    assert records[0]["collectives"] == records[1]["collectives"]
    # Two more may come from connecting. On a busy machine a rank may be late in other rounds, too.
    assert 3 <= records[0]["collectives"] <= 30
