"""Algorithms that average with some peers, in parts, later, or in a thread: what they end with, and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_jobs import ENGINES, RunRanks, runner
from test_resume import SETUP

pytestmark = pytest.mark.tensorflow

MODEL = """
    a, c = tfdistkit.algorithms, tfdistkit.compression
    strategy = tfdistkit.strategy(sys.argv[1])
    rank = tfdistkit.rank()
    random = np.random.default_rng(0)
    x = random.normal(size=(36, 6)).astype("float32")
    y = x[:, :2] * 2 + 0.1

    def small(adam=False):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            model.compile(keras.optimizers.Adam(0.02) if adam else keras.optimizers.SGD(0.05), "mse")
        return model
"""

SCRIPT = (
    SETUP
    + MODEL
    + """
    class Apart(keras.callbacks.Callback):
        # How much the ranks' kernels and biases differ after each step.
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_end(self, batch, logs=None):
            own = [v.numpy() for v in self.model.trainable_weights]
            gaps = [np.abs(tfdistkit.collectives.broadcast(one).numpy() - one).max() for one in own]
            self.seen.append(tfdistkit.collectives.all_reduce(np.array(gaps), op="max").numpy().tolist())

    def fit(algorithm, **options):
        strategy.reducer = algorithm or tfdistkit.communication.Average()
        model, apart = small(), Apart()
        history = model.fit(x, y, batch_size=6, epochs=2, verbose=0, callbacks=[apart], **options)
        return {"weights": [w.tolist() for w in model.get_weights()], "apart": apart.seen,
                "loss": history.history["loss"]}

    plain = keras.optimizers.SGD(1.0)
    found = {
        "every step": fit(None),
        "all": fit(a.Decentralized()),
        "shift_one": fit(a.Decentralized("shift_one")),
        "Int8 to one": fit(a.Decentralized("shift_one", compression=c.Int8(block=8))),
        "TopK to all": fit(a.Decentralized(every=2, compression=c.TopK(0.5))),
        "DiLoCo": fit(a.DiLoCo(3)),
        "DiLoCo as compressed": fit(a.DiLoCo(3, compression=c.Where(lambda variable: False, c.FP16()))),
        "fragments": fit(a.DiLoCo(4, plain, fragments=2)),
        "delay": fit(a.DiLoCo(3, plain, delay=1, mix=0.0)),
    }
    try:
        found["thread"] = fit(a.AsyncModelAverage(1))
        # The process exits while an average may be under way.
        model = small()
        for _ in range(4):
            model.train_on_batch(x[:6], y[:6])
        tfdistkit.collectives.barrier()  # A rank that leaves earlier would be an error in the steps of the other.
    except tfdistkit.errors.UnsupportedError as error:
        found["refused"] = str(error)
    print(json.dumps(found))
"""
)

RESUMED = (
    SETUP
    + MODEL
    + """
    folder = pathlib.Path(os.environ["TEST_FOLDER"])
    data = lambda: dict(x=x, y=y, batch_size=7)
    adam = lambda: small(adam=True)
    for name, algorithm in {
        "all": a.Decentralized(every=2, compression=c.TopK(0.5)),
        "one": a.Decentralized("shift_one", compression="fp16"),
        "streaming": a.DiLoCo(4, fragments=2, delay=1, compression=c.PowerSGD(1, min_compression_rate=1.0)),
    }.items():
        strategy.reducer = algorithm
        expected = run(adam, data, list, folder / f"whole {name}{rank}", save_freq=2)
        assert run(adam, data, list, folder / f"{name}{rank}", 9, save_freq=2) is None
        assert_same(run(adam, data, list, folder / f"{name}{rank}", save_freq=2), expected)
    print("same")
"""
)

SWAPS = """
    import sys
    import numpy as np, tensorflow as tf
    import tfdistkit
    from tfdistkit.communication.algorithms.peers import partner_of
    strategy = tfdistkit.strategy(sys.argv[1])
    number = strategy.num_replicas_in_sync

    @tf.function
    def swapped(turn):
        def of_replica():
            wire = strategy.wire()
            own = tf.cast(wire.replica_id, tf.int32)
            data = tf.cast(tf.range(37) * 5 + own, tf.uint8)
            partner = partner_of(turn, own, number)
            return wire.swap(data, partner), partner
        return strategy.run(of_replica)

    met = set()
    for turn in range(6):
        data, partner = (strategy.experimental_local_results(one)[0].numpy() for one in swapped(tf.constant(turn)))
        np.testing.assert_array_equal(data, (np.arange(37) * 5 + partner).astype("uint8"))
        met.add(int(partner))
    print("met", sorted(met))
"""


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    return runner(request)


@pytest.fixture(
    scope="module",
    params=[
        "multiworker",
        pytest.param("multiworker_ring", marks=pytest.mark.thorough),
        pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.thorough]),
    ],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; and over what."""
    folder: Path = tmp_path_factory.mktemp("peers")
    printed = runner(request)(request.param, SCRIPT, folder)
    return [{"engine": request.param, **json.loads(text.splitlines()[-1])} for text in printed]


def runs(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in found[0].items() if isinstance(one, dict)}


def close(one: dict[str, Any], other: dict[str, Any], atol: float = 2e-6) -> bool:
    return all(np.allclose(a, b, rtol=0, atol=atol) for a, b in zip(one["weights"], other["weights"], strict=True))


def test_all_ranks_end_with_the_same_weights(found: list[dict[str, Any]]) -> None:
    for name, one in runs(found).items():
        assert found[1][name]["weights"] == one["weights"], name
        assert np.isfinite(one["loss"]).all() and one["loss"][-1] < one["loss"][0], name


def test_averages_in_every_step_are_synchronous_training(found: list[dict[str, Any]]) -> None:
    every_step = found[0]["every step"]
    # Of two workers one peer is all.
    for name in ("all", "shift_one"):
        assert close(found[0][name], every_step) and not np.any(found[0][name]["apart"]), name


def test_what_a_peer_gets_is_rounded_and_right_in_the_mean(found: list[dict[str, Any]]) -> None:
    int8 = found[0]["Int8 to one"]
    assert close(int8, found[0]["every step"], 2e-3) and 0 < np.max(int8["apart"]) < 0.02
    assert close(found[0]["TopK to all"], found[0]["every step"], 0.2)
    assert [bool(np.any(gap)) for gap in found[0]["TopK to all"]["apart"][:6]] == [True, False] * 3


def test_what_a_compression_leaves_alone_is_as_without_it(found: list[dict[str, Any]]) -> None:
    assert close(found[0]["DiLoCo as compressed"], found[0]["DiLoCo"])


def test_fragments_are_averaged_in_turn(found: list[dict[str, Any]]) -> None:
    # The larger one, the kernel, first: every 4 steps, and the other one 2 steps later.
    seen = [[gap > 0 for gap in gaps] for gaps in found[0]["fragments"]["apart"][:5]]
    assert seen == [[True, True], [True, False], [True, True], [False, True], [True, True]]


def test_an_average_is_taken_over_later(found: list[dict[str, Any]]) -> None:
    seen = [bool(np.any(gaps)) for gaps in found[0]["delay"]["apart"][:5]]
    assert seen == [True, True, True, False, True]


def test_a_thread_averages_where_the_transport_can(found: list[dict[str, Any]]) -> None:
    for rank in found:
        if rank["engine"] == "multiworker_ring":
            assert "AsyncModelAverage needs shared memory or Horovod" in rank["refused"]
        else:
            assert close(rank["thread"], rank["every step"], 0.2) and "refused" not in rank


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES[:3])
def test_a_resumed_run_ends_as_an_uninterrupted_one(run_ranks: RunRanks, engine: str, tmp_path: Path) -> None:
    for printed in run_ranks(engine, RESUMED, tmp_path, TEST_FOLDER=str(tmp_path)):
        assert printed.splitlines()[-1] == "same"


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES[:3])
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_each_rank_meets_each(run_ranks: RunRanks, engine: str, ranks: int, tmp_path: Path) -> None:
    for rank, printed in enumerate(run_ranks(engine, SWAPS, tmp_path, ranks)):
        expected = [other for other in range(ranks) if other != rank or ranks % 2]
        assert printed.splitlines()[-1] == f"met {expected}"
