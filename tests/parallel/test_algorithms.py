"""Algorithms that let workers train alone for a while: what is averaged, when, and what everybody else sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_jobs import RunRanks, runner
from test_resume import SETUP

pytestmark = pytest.mark.tensorflow

# Models, data and algorithms of the scripts of these tests.
MODELS = (
    SETUP
    + """
    a = tfdistkit.algorithms
    strategy = tfdistkit.strategy(sys.argv[1])
    rank, folder = tfdistkit.rank(), pathlib.Path(os.environ["TEST_FOLDER"])
    random = np.random.default_rng(0)
    x = random.normal(size=(38, 6)).astype("float32")
    y = x[:, :2] * 2 + 0.1

    class OwnStep(keras.Sequential):
        # Its logs are not the results of its metrics, so that Keras passes them on as they are.
        def train_step(self, data):
            logs = super().train_step(data)
            mean = tf.reduce_mean(data[0] * self.layers[0].kernel[0, 0])
            self.own.update_state(mean)
            own = self.own.result()
            # The other model's logs are computed from a result.
            more = {"more": 100 * own} if self.name == "more" else {}
            return {"own": own, "mean": mean, "rows": tf.shape(data[0])[0], "seven": tf.constant(7), **more}

    def small(optimizer="sgd", kind=keras.Sequential, synchronized=False, name="small", policy="float32", **options):
        keras.utils.set_random_seed(3)
        keras.config.set_dtype_policy(policy)
        with strategy.scope():
            layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(synchronized=synchronized),
                      keras.layers.Dense(2)]
            model = kind([keras.Input((6,)), *layers], name=name)
            model.own = keras.metrics.Mean("own") if kind is OwnStep else None
            optimizers = {"sgd": lambda: keras.optimizers.SGD(0.05), "adam": lambda: keras.optimizers.Adam(0.02),
                          "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
                          "ema": lambda: keras.optimizers.AdamW(0.02, use_ema=True)}
            model.compile(optimizers[optimizer](), "mse", **options)
        keras.config.set_dtype_policy("float32")
        return model
"""
)
SCRIPT = (
    MODELS
    + """
    def sent():
        # The collectives of this process until now, where they can be counted.
        engine = getattr(getattr(strategy, "transport", None), "engine", None)
        return 0 if engine is None else sum(engine._counts.values())

    class Apart(keras.callbacks.Callback):
        # Whether the ranks have other weights after each step.
        def __init__(self):
            super().__init__()
            self.seen, self.sent = [], []

        def on_train_batch_begin(self, batch, logs=None):
            self.before = sent()

        def on_train_batch_end(self, batch, logs=None):
            self.sent.append(sent() - self.before)
            own = self.model.trainable_weights[0].numpy()
            self.seen.append(not np.array_equal(tfdistkit.collectives.broadcast(own).numpy(), own))

    def fit(algorithm, optimizer="sgd", data=dict(x=x, y=y, batch_size=7), epochs=3, **options):
        strategy.reducer = algorithm or tfdistkit.communication.Average()
        model, apart = small(optimizer, **options), Apart()
        check = tfdistkit.callbacks.ConsistencyCheck(every=1)
        history = model.fit(**data, epochs=epochs, verbose=0, validation_data=(x, y), callbacks=[apart, check])
        weights = [w.tolist() for w in model.get_weights()]
        somewhere = tfdistkit.collectives.all_reduce(np.array(apart.seen, "int32"), op="max").numpy().astype(bool)
        logs = {name: [float(np.mean(one)) for one in each] for name, each in history.history.items()}
        seen = {"apart": somewhere.tolist(), "sent": apart.sent, "logs": logs}
        return {"weights": weights, "loss": logs["val_loss"], **seen}

    few = lambda: dict(x=tf.data.Dataset.from_tensor_slices((x[:9], y[:9])).batch(4))

    found = {
        "every step": fit(None),
        "LocalSGD(1)": fit(a.LocalSGD(1)),
        "statistics of all": fit(None, synchronized=True, epochs=2, policy="float64"),
        "statistics of all, LocalSGD(1)": fit(a.LocalSGD(1), synchronized=True, epochs=2, policy="float64"),
        "no rows": fit(None, data=few(), policy="float64"),
        "no rows, LocalSGD(1)": fit(a.LocalSGD(1), data=few(), policy="float64"),
        "own step": fit(None, kind=OwnStep),
        "own step, LocalSGD(1)": fit(a.LocalSGD(1), kind=OwnStep),
        "computed logs": fit(None, kind=OwnStep, name="more"),
        "computed logs, LocalSGD(1)": fit(a.LocalSGD(1), kind=OwnStep, name="more"),
        "slots": fit(a.LocalSGD(2, slots="keep"), "ema"),
        "LocalSGD(2)": fit(a.LocalSGD(2), "momentum"),
        "LocalSGD(2), 3 steps an execution": fit(a.LocalSGD(2), "momentum", steps_per_execution=3),
        "LocalSGD(100)": fit(a.LocalSGD(100), "ema"),
        "warm-up": fit(a.LocalSGD(100, warmup_steps=8)),
        "clock": fit(a.LocalSGD("0.05 seconds"), "adam"),
        "LocalSGD(3)": fit(a.LocalSGD(3), "adam"),
        "DiLoCo as LocalSGD(3)": fit(a.DiLoCo(3, keras.optimizers.SGD(1.0), slots="average"), "adam"),
        "DiLoCo": fit(a.DiLoCo(3), "adam"),
        "eager": fit(a.LocalSGD(2), "momentum", run_eagerly=True),
    }
    print(json.dumps(found))
"""
)
# The engines of these tests.
OVER = [
    "multiworker",
    pytest.param("multiworker_ring", marks=pytest.mark.thorough),
    pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.thorough]),
]
STEPS = 6  # An epoch of 38 rows in batches of 7.


def found_by_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, script: str
) -> list[dict[str, Any]]:
    """Runs a script on two ranks over an engine of `OVER`; returns what each printed last."""
    folder: Path = tmp_path_factory.mktemp("algorithms")
    run: RunRanks = runner(request)
    return [json.loads(text.splitlines()[-1]) for text in run(request.param, script, folder, TEST_FOLDER=str(folder))]


@pytest.fixture(scope="module", params=OVER)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return found_by_ranks(request, tmp_path_factory, SCRIPT)


def test_all_ranks_end_with_the_same_weights(found: list[dict[str, Any]]) -> None:
    for name, one in found[0].items():
        if isinstance(one, dict) and "weights" in one:
            assert found[1][name]["weights"] == one["weights"] and found[1][name]["loss"] == one["loss"], name
            assert np.isfinite(one["loss"]).all(), name
            assert one["loss"][-1] < one["loss"][0] or name.startswith("no rows"), name  # Those are few, and not all.


def close(one: dict[str, Any], other: dict[str, Any], atol: float = 2e-6) -> bool:
    return all(np.allclose(a, b, rtol=0, atol=atol) for a, b in zip(one["weights"], other["weights"], strict=True))


@pytest.mark.parametrize("what", ("every step", "statistics of all", "no rows", "own step", "computed logs"))
def test_an_average_in_every_step_is_synchronous_training(found: list[dict[str, Any]], what: str) -> None:
    """With the moving statistics of BatchNormalization, and logs that are merged at the end of an epoch."""
    local = found[0]["LocalSGD(1)" if what == "every step" else f"{what}, LocalSGD(1)"]
    # One row, or two, of a worker are normalized to +-1, which makes rounding large: those cases are in float64.
    # (Synchronized statistics are float32 there, too.)
    assert close(local, found[0][what], {"statistics of all": 1e-7, "no rows": 1e-9}.get(what, 2e-6))
    assert not any(local["apart"])
    for rank in found:
        own = rank["LocalSGD(1)" if what == "every step" else f"{what}, LocalSGD(1)"]["logs"]
        assert sorted(own) == sorted(rank[what]["logs"])
        for name, values in rank[what]["logs"].items():
            np.testing.assert_allclose(own[name], values, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "round_steps"), (("LocalSGD(2)", 2), ("LocalSGD(3)", 3), ("DiLoCo", 3), ("eager", 2), ("slots", 2))
)
def test_nothing_travels_in_a_local_step(found: list[dict[str, Any]], name: str, round_steps: int) -> None:
    for rank in found:
        sent = rank[name]["sent"][: STEPS - 1]
        if not any(sent):  # Cannot be counted over this transport.
            assert not any(rank["every step"]["sent"])
            continue
        assert [bool(n) for n in sent] == [(step + 1) % round_steps == 0 for step in range(STEPS - 1)]


def test_warm_up_steps_talk_and_later_ones_do_not(found: list[dict[str, Any]]) -> None:
    sent = found[0]["warm-up"]["sent"]
    if any(sent):
        assert all(sent[:8]) and not any(sent[8 : 2 * STEPS])


@pytest.mark.parametrize(
    ("name", "apart"),
    (
        ("LocalSGD(2)", [True, False, True, False, True]),
        ("eager", [True, False, True, False, True]),
        ("LocalSGD(3)", [True, True, False, True, True]),
        ("DiLoCo", [True, True, False, True, True]),
        ("LocalSGD(100)", [True] * 5),
        ("warm-up", [False] * 5),
    ),
)
def test_ranks_are_apart_between_averages(found: list[dict[str, Any]], name: str, apart: list[bool]) -> None:
    seen = found[0][name]["apart"]
    assert seen[: STEPS - 1] == apart
    if name == "warm-up":  # 8 steps in all: the third of the second epoch is the first alone.
        assert seen[STEPS : STEPS + 3] == [False, False, True]


def test_several_steps_in_an_execution_are_the_same(found: list[dict[str, Any]]) -> None:
    assert found[0]["LocalSGD(2), 3 steps an execution"]["weights"] == found[0]["LocalSGD(2)"]["weights"]
    # Without an algorithm, eager steps round as differently.
    assert close(found[0]["eager"], found[0]["LocalSGD(2)"], 2e-5)


def test_an_outer_step_to_the_average_is_local_sgd(found: list[dict[str, Any]]) -> None:
    assert close(found[0]["DiLoCo as LocalSGD(3)"], found[0]["LocalSGD(3)"])
    assert not close(found[0]["DiLoCo"], found[0]["LocalSGD(3)"], 1e-3)
