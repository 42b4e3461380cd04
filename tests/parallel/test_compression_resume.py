"""What compressions keep for later steps, in backups: each rank's own, and their sum on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rank_jobs import RunRanks, runner
from test_resume import ON_TWO_RANKS, SETUP

pytestmark = pytest.mark.tensorflow

MODEL = """
    c = tfdistkit.compression
    strategy = tfdistkit.strategy(sys.argv[1])
    rank = tfdistkit.rank()
    folder = pathlib.Path(os.environ["TEST_FOLDER"])

    def small(optimizer=lambda: keras.optimizers.SGD(0.05)):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [keras.layers.Dense(12, "tanh"), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(optimizer(), "mse")
        return model
"""

SAME = """
    for name, reducer in {
        "top_k": c.TopK(0.1, momentum=0.5, min_size=0), "power_sgd": c.PowerSGD(1, min_compression_rate=1.0),
    }.items():
        strategy.reducer = reducer
        expected = run(small, in_arrays, list, None)
        for break_at in (3, 6):
            assert run(small, in_arrays, list, folder / f"{name}{rank}", break_at, save_freq=2) is None
        found = run(small, in_arrays, list, folder / f"{name}{rank}", save_freq=2)
        assert found["batches"][0] == (1, 1), found["batches"]
        assert_same(found, expected)
    # An optimizer that compresses its momentum, broken off before and after its variance is frozen.
    strategy.reducer = tfdistkit.communication.Average()
    one_bit = functools.partial(small, lambda: c.OneBitAdam(0.02, freeze_after=4))
    expected = run(one_bit, in_arrays, list, None)
    for break_at in (3, 6):
        assert run(one_bit, in_arrays, list, folder / f"one_bit{rank}", break_at, save_freq=2) is None
    assert_same(run(one_bit, in_arrays, list, folder / f"one_bit{rank}", save_freq=2), expected)
    print("same")
"""

OTHER_COUNT = """
    strategy.reducer = c.TopK(0.05, momentum=0.5, min_size=0)
    seen = {}

    class Watch(keras.callbacks.Callback):
        def look(self, when):
            kept = [v for v in self.model.optimizer.variables if "rest" in v.path or "velocity" in v.path]
            seen[when] = [tfdistkit.collectives.all_reduce(v.numpy()).numpy().tolist() for v in kept]

        def on_train_batch_begin(self, batch, logs=None):
            if "begin" not in seen:
                self.look("begin")

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.look("second step")
            if batch == 2 and os.environ["TEST_BREAKS"] == "1":
                raise RuntimeError  # The backup is of the step before.

    try:
        run(small, in_arrays, lambda: [Watch()], folder / "backup", save_freq=2)
    except RuntimeError:
        pass
    print(json.dumps(seen))
"""


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    return runner(request)


@pytest.mark.parametrize("engine", ON_TWO_RANKS)
def test_a_resumed_run_ends_as_an_uninterrupted_one(run_ranks: RunRanks, engine: str, tmp_path: Path) -> None:
    for printed in run_ranks(engine, SETUP + MODEL + SAME, tmp_path, TEST_FOLDER=str(tmp_path)):
        assert printed.splitlines()[-1] == "same"


def test_another_number_of_ranks_resumes_with_the_sums(run_ranks: RunRanks, tmp_path: Path) -> None:
    seen = {}
    for ranks, breaks in ((3, "1"), (2, "0")):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        variables = {"TEST_FOLDER": str(tmp_path), "TEST_BREAKS": breaks}
        seen[ranks] = json.loads(run_ranks("multiworker", SETUP + MODEL + OTHER_COUNT, folder, ranks, **variables)[0])
    assert len(seen[2]["begin"]) == 12  # What was not sent, and the momentum, of 6 variables.
    for found, expected in zip(seen[2]["begin"], seen[3]["second step"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert any(np.abs(one).max() > 1e-3 for one in seen[3]["second step"])
