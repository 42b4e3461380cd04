"""`Hierarchical`: ranks of a host train synchronously, hosts average their weights; results, backups, what travels.

The ranks are on loopback, but say that they are on two hosts: ranks 0 and 1 on one, rank 2 on another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_jobs import RunRanks, runner
from test_resume import SETUP

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(900)]

SCRIPT = (
    SETUP
    + """
    import time
    from tfdistkit.collectives.shm import peers
    peers.host_id = lambda: 1 + int(tfdistkit.rank()) // 2
    a, c = tfdistkit.algorithms, tfdistkit.compression
    strategy = tfdistkit.strategy("multiworker", algorithm=a.Hierarchical())
    rank, folder = tfdistkit.rank(), pathlib.Path(os.environ["TEST_FOLDER"])
    random = np.random.default_rng(0)
    x = random.normal(size=(38, 6)).astype("float32")
    y = x[:, :2] * 2 + 0.1

    def small(optimizer="sgd", synchronized=False, policy="float32", table=False):
        keras.utils.set_random_seed(3)
        keras.config.set_dtype_policy(policy)
        with strategy.scope():
            layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(synchronized=synchronized),
                      keras.layers.Dense(12, "tanh"), keras.layers.Dense(2)]
            if table:
                layers = [keras.layers.Embedding(9, 3), keras.layers.Flatten(), *layers]
            model = keras.Sequential([keras.Input((6,)), *layers])
            optimizers = {"sgd": lambda: keras.optimizers.SGD(0.05), "adam": lambda: keras.optimizers.Adam(0.02),
                          "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9, global_clipnorm=0.5),
                          "ema": lambda: keras.optimizers.AdamW(0.02, use_ema=True)}
            model.compile(optimizers[optimizer](), "mse")
        keras.config.set_dtype_policy("float32")
        return model

    class Apart(keras.callbacks.Callback):
        # Which ranks have other weights than rank 0 after each step.
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_end(self, batch, logs=None):
            own = self.model.trainable_weights[0].numpy()
            of_all = tfdistkit.collectives.all_gather(own[None]).numpy()
            self.seen.append([not np.array_equal(one, of_all[0]) for one in of_all])

    def fit(algorithm, optimizer="sgd", data=dict(x=x, y=y, batch_size=7), epochs=2, **options):
        strategy.reducer = algorithm or tfdistkit.communication.Average()
        model, apart = small(optimizer, **options), Apart()
        check = tfdistkit.callbacks.ConsistencyCheck(every=1)
        history = model.fit(**data, epochs=epochs, verbose=0, validation_data=(x, y), callbacks=[apart, check])
        return {"weights": [w.tolist() for w in model.get_weights()], "apart": apart.seen, "logs": history.history}

    # Two rows at last: none on the second host.
    few = lambda: dict(x=tf.data.Dataset.from_tensor_slices((np.abs(x[:10] * 3).astype("int32") % 9, y[:10])).batch(4))
    every = lambda steps, **options: a.Hierarchical(across=a.LocalSGD(steps, **options))
    exact = dict(data=few(), synchronized=True, table=True, policy="float64")
    found = {
        "every step": fit(None, **exact),
        "every step, Hierarchical": fit(every(1), **exact),
        "momentum": fit(every(2, warmup_steps=4), "momentum"),
        "slots": fit(every(2, slots="keep"), "ema"),
        "fragments": fit(a.Hierarchical("fp16", a.DiLoCo(3, fragments=2, delay=1, compression="fp16")), "adam"),
        "bytes": fit(a.Hierarchical(c.ByteGrad(block=64), a.LocalSGD(3)), "adam"),
        "rank 1": fit(a.Hierarchical(c.PowerSGD(1, min_compression_rate=1.0), a.LocalSGD(3)), "adam"),
    }

    # Rank 2 takes steps between two averages while the other host has not begun with them.
    strategy.reducer = every(100)
    model, timer = small("adam"), tfdistkit.callbacks.StepTimer(verbose=0)
    model.train_on_batch(x[:7], y[:7])
    there, deadline = folder / "rank 2 has taken its steps", time.monotonic() + 60
    while rank != 2 and not there.exists():
        assert time.monotonic() < deadline, "rank 2 waits for ranks of another host"
        time.sleep(0.05)
    for _ in range(3):
        model.train_on_batch(x[:7], y[:7])
    there.touch()
    own = model.trainable_weights[0].numpy()
    losses = [float(model.evaluate(x, y, verbose=0)), float(np.mean((model.predict(x, verbose=0) - y) ** 2))]
    found["evaluated"] = {"moved": not np.array_equal(own, model.trainable_weights[0].numpy()), "losses": losses}

    # An epoch of 6 steps, of which the second counts.
    strategy.reducer = every(4)
    logs = small("momentum").fit(x, y, batch_size=7, epochs=2, verbose=0, callbacks=[timer]).history
    found["sent"] = {name: values[1] for name, values in logs.items()}

    # Broken off in the middle of a round, and resumed.
    resumed = {"slots": every(3, slots="keep", warmup_steps=1),
               "rank 1": a.Hierarchical(c.PowerSGD(1, min_compression_rate=1.0), a.DiLoCo(4))}
    for name, algorithm in resumed.items():
        strategy.reducer = algorithm
        data = lambda: dict(x=x, y=y, batch_size=7)
        expected = run(lambda: small("adam"), data, list, folder / f"whole {name}{rank}", save_freq=2)
        assert run(lambda: small("adam"), data, list, folder / f"{name}{rank}", 9, save_freq=2) is None
        assert_same(run(lambda: small("adam"), data, list, folder / f"{name}{rank}", save_freq=2), expected)
    print(json.dumps(found))
"""
)
STEPS = 6  # An epoch of 38 rows in batches of 7.


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder: Path = tmp_path_factory.mktemp("hosts")
    run: RunRanks = runner(request)
    printed = run("multiworker", SCRIPT, folder, 3, TEST_FOLDER=str(folder))
    return [json.loads(text.splitlines()[-1]) for text in printed]


def test_an_average_in_every_step_is_synchronous_training(found: list[dict[str, Any]]) -> None:
    """With the state of layers, a table, and a host without rows."""
    for rank in found:
        expected, own = rank["every step"], rank["every step, Hierarchical"]
        assert all(
            np.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(own["weights"], expected["weights"], strict=True)
        )
        assert not np.any(own["apart"])
        for name, values in expected["logs"].items():
            np.testing.assert_allclose(own["logs"][name], values, rtol=2e-5, atol=1e-6, err_msg=name)


def test_all_ranks_end_with_the_same_weights(found: list[dict[str, Any]]) -> None:
    for name, one in found[0].items():
        if "weights" not in one:
            continue
        for other in found[1:]:
            assert other[name]["weights"] == one["weights"] and other[name]["logs"] == one["logs"], name
        losses = one["logs"]["val_loss"]
        assert np.isfinite(losses).all() and losses[-1] < losses[0], name


@pytest.mark.parametrize(
    ("name", "apart"),
    (
        ("momentum", [False] * 4 + [True, False]),  # Four of them synchronous.
        ("slots", [True, False] * 3),
        ("bytes", [True, True, False] * 2),
        ("rank 1", [True, True, False] * 2),
    ),
)
def test_ranks_of_a_host_are_equal_and_hosts_differ_between_averages(
    found: list[dict[str, Any]], name: str, apart: list[bool]
) -> None:
    seen = np.array(found[0][name]["apart"])[: STEPS - 1]
    assert not seen[:, :2].any()
    assert seen[:, 2].tolist() == apart[: STEPS - 1]


def test_a_host_takes_steps_that_another_has_not_begun(found: list[dict[str, Any]]) -> None:
    """The job has asserted it. What others see then is the average."""
    for rank in found:
        assert rank["evaluated"]["moved"]
        np.testing.assert_allclose(*rank["evaluated"]["losses"], rtol=1e-5)
        assert rank["evaluated"]["losses"] == found[0]["evaluated"]["losses"]


def test_bytes_between_the_hosts_are_counted(found: list[dict[str, Any]]) -> None:
    """Of the weights and a momentum for each: 228 + 2 numbers, two averages in 6 steps; the layer state and logs."""
    sent = found[0]["sent"]
    numbers = 6 * 8 + 8 + 2 * 8 + 8 * 12 + 12 + 12 * 2 + 2
    assert sent["steps_per_sync"] == STEPS / 2
    assert 2 * 4 * 2 * numbers < STEPS * sent["bytes_per_step"] < 2 * 4 * 2 * numbers * 1.2
