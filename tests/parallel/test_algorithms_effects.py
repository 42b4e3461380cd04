"""Algorithms that let workers train alone, in loops and around training: evaluation, checkpoints, refusals, bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_algorithms import MODELS, OVER, STEPS, found_by_ranks

pytestmark = pytest.mark.tensorflow

SCRIPT = (
    MODELS
    + """
    import gc
    found = {}
    others = []

    def loop(algorithm):
        # As TensorFlow's tutorials write it: the optimizer is built while the function is traced.
        strategy.reducer = algorithm or tfdistkit.communication.Average()
        others[:] = [small("momentum")]
        others[0].fit(x, y, batch_size=7, verbose=0)
        with strategy.scope():
            model, optimizer = small(), keras.optimizers.SGD(0.05)

        traces = []

        def forget_the_other_model():
            # The function was traced once, with the other model alive.
            if traces:
                others.clear()
                gc.collect()
            traces.append(1)

        def replica(batch):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(tf.reduce_mean((model(batch[0]) - batch[1]) ** 2, -1))
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

        @tf.function
        def step(batch):
            forget_the_other_model()
            strategy.run(replica, args=(batch,))

        for batch in strategy.distribute_batches(tf.data.Dataset.from_tensor_slices((x, y)).batch(7)):
            step(batch)
        strategy.settle_weights()
        assert not others
        return [w.tolist() for w in model.get_weights()]

    found["loops"] = [loop(algorithm) for algorithm in (None, a.LocalSGD(1), a.Decentralized(), a.DiLoCo(3))]

    # The warm-up ends within an execution of four steps, in which a rank has three rows or two of each batch.
    strategy.reducer = a.LocalSGD(2, warmup_steps=3)
    found["executions"] = []
    for steps in (1, 4):
        model = small("momentum", steps_per_execution=steps, policy="float64")
        model.fit(x, y, batch_size=5, epochs=2, verbose=0)
        found["executions"].append([w.tolist() for w in model.get_weights()])

    # Equal weights are equal to their average, also where a dtype has no 257.
    found["narrow"] = []
    for algorithm in (a.LocalSGD(1), a.Decentralized(), a.LocalSGD(2, slots="average")):
        strategy.reducer, model = algorithm, small("momentum", policy="bfloat16")
        model.optimizer.learning_rate = 0.0
        before = [w.astype("float32").tolist() for w in model.get_weights()[:2]]
        model.fit(np.ones((514, 6)), np.ones((514, 2)), batch_size=514, epochs=3, verbose=0)
        found["narrow"].append([before, [w.astype("float32").tolist() for w in model.get_weights()[:2]]])

    # What others see is the average: evaluate, predict, a checkpoint in the middle of a round.
    strategy.reducer = a.LocalSGD(100)
    model = small("adam")
    for _ in range(3):
        model.train_on_batch(x[:8], y[:8])
    own = model.trainable_weights[0].numpy()
    losses = [float(model.evaluate(x, y, verbose=0)), float(np.mean((model.predict(x, verbose=0) - y) ** 2))]
    found["evaluated"] = {"moved": not np.array_equal(own, model.trainable_weights[0].numpy()), "losses": losses}
    model = small("adam")
    saver = tfdistkit.callbacks.ChiefCheckpoint(str(folder / "middle.weights.h5"), save_freq=2, save_weights_only=True)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                found["in the middle"] = [w.tolist() for w in self.model.get_weights()]
                self.model.stop_training = True

    model.fit(x, y, batch_size=7, epochs=1, verbose=0, callbacks=[saver, Stop()])
    if rank == 0:
        model.load_weights(folder / "middle.weights.h5")
        found["saved"] = [w.tolist() for w in model.get_weights()]

    # Broken off in the middle of a round, and resumed.
    algorithms = {"local": a.LocalSGD(3, warmup_steps=1), "diloco": a.DiLoCo(2), "slots": a.LocalSGD(3, slots="keep")}
    for name, algorithm in algorithms.items():
        strategy.reducer = algorithm
        data = lambda: dict(x=x, y=y, batch_size=7)
        expected = run(lambda: small("adam"), data, list, folder / f"whole {name}{rank}", save_freq=2)
        assert run(lambda: small("adam"), data, list, folder / f"{name}{rank}", 9, save_freq=2) is None
        assert_same(run(lambda: small("adam"), data, list, folder / f"{name}{rank}", save_freq=2), expected)

    # The slots of one worker resume with their mean on another number of them, and are not compared.
    from tfdistkit.callbacks.backup import model_state
    for algorithm in (a.LocalSGD(100, slots="keep"), a.DiLoCo(100), a.DiLoCo(100, fragments=2)):
        strategy.reducer = algorithm
        model = small("adam")
        model.fit(x, y, batch_size=7, verbose=0, callbacks=[tfdistkit.callbacks.ConsistencyCheck(every=1)])
        own = next(v for v in model.optimizer.variables if v.path.endswith("momentum")).numpy()
        other = tfdistkit.collectives.broadcast(own).numpy()
        kept = [how for _, how in model_state._of_replicas(model)]
        one = {"apart": bool((own != other).any()), "how": sorted(set(kept)), "number": len(kept)}
        found.setdefault("kept", []).append(one)

    strategy.reducer = a.LocalSGD(2)
    try:
        small().fit(x, y, batch_size=7, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    except tfdistkit.errors.UnsupportedError as error:
        found["stops alone"] = str(error)
    with strategy.scope():
        scaled = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        scaled.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    try:
        scaled.fit(x, y, batch_size=7, verbose=0)
    except tfdistkit.errors.UnsupportedError as error:
        found["scaled"] = str(error)

    # What StepTimer counts in an epoch of 6 steps. The first execution does not count, so the second epoch.
    c = tfdistkit.compression
    senders = {"none": None, "fp16": c.FP16(), "bytes": c.ByteGrad(block=64), "local": a.LocalSGD(4)}
    for name, sender in senders.items():
        strategy.reducer = sender or tfdistkit.communication.Average()
        model, timer = small("momentum"), tfdistkit.callbacks.StepTimer(verbose=0)
        logs = model.fit(x, y, batch_size=7, epochs=2, verbose=0, callbacks=[timer]).history
        found[f"sent {name}"] = {key: values[1] for key, values in logs.items()}
        found["trainable"] = int(sum(np.prod(v.shape) for v in model.trainable_variables))
    print(json.dumps(found))
"""
)


@pytest.fixture(scope="module", params=OVER)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return found_by_ranks(request, tmp_path_factory, SCRIPT)


def test_a_loop_whose_function_builds_the_optimizer(found: list[dict[str, Any]]) -> None:
    expected, *local, last = found[0]["loops"]
    for weights in local:
        for a, b in zip(weights, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    assert found[1]["loops"][-1] == last


def test_a_warm_up_that_ends_within_an_execution(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for one, more in zip(*rank["executions"], strict=True):
            np.testing.assert_allclose(more, one, rtol=0, atol=1e-6)  # The share of rows is a float32.


def test_an_average_of_equal_weights_changes_nothing(found: list[dict[str, Any]]) -> None:
    assert all(before == after for before, after in found[0]["narrow"])


def test_slots_are_kept(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert all(kept["how"] == ["mean", "sum"] for kept in rank["kept"])
        # Two slots of each of six weights, and the count of rows; with fragments that of each of them, too.
        assert [kept["number"] for kept in rank["kept"]] == [12 + 1, 12 + 1, 12 + 2]
    assert all(kept["apart"] for kept in found[1]["kept"]) and not any(kept["apart"] for kept in found[0]["kept"])


def test_a_callback_that_would_stop_one_rank_is_refused(found: list[dict[str, Any]]) -> None:
    assert all("TerminateOnNaN must be wrapped in StopTogether" in rank["stops alone"] for rank in found)


def test_evaluate_and_predict_see_the_average(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["evaluated"]["moved"]
        np.testing.assert_allclose(*rank["evaluated"]["losses"], rtol=1e-5)
    assert found[0]["evaluated"]["losses"] == found[1]["evaluated"]["losses"]


def test_a_checkpoint_in_the_middle_holds_the_average(found: list[dict[str, Any]]) -> None:
    assert found[0]["saved"] == found[0]["in the middle"] == found[1]["in the middle"]


def test_a_loss_scale_is_refused(found: list[dict[str, Any]]) -> None:
    assert all("LocalSGD cannot be used with a LossScaleOptimizer" in rank["scaled"] for rank in found)


def test_bytes_of_a_step_are_counted(found: list[dict[str, Any]]) -> None:
    """Each of two workers sends a sum once. Logs and the state of layers travel, too, but not in local steps."""
    numbers = found[0]["trainable"]
    sent = {name: found[0][f"sent {name}"] for name in ("none", "fp16", "bytes", "local")}
    of_step = {name: one["bytes_per_step"] for name, one in sent.items()}
    others = of_step["none"] - 4 * numbers
    assert 0 < others < 400 and sent["none"]["bytes_ratio"] == 1
    assert of_step["fp16"] == pytest.approx(others + 2 * numbers)
    # Blocks of 64 numbers with two float32: half of them are sent to the other worker, and the sum of the other half.
    blocks = -(-numbers // 128)
    assert of_step["bytes"] == pytest.approx(others + 2 * blocks * (64 + 8))
    # After the fourth step, and at the end of the epoch: weights, momentum, three float64; statistics and a weight.
    assert of_step["local"] == pytest.approx(2 * (8 * numbers + 24 + 4 * 2 * 8 + 4) / STEPS)
    for name, one in sent.items():
        if name != "local":
            assert one["bytes_ratio"] == pytest.approx(of_step[name] / of_step["none"])
        assert one == found[1][f"sent {name}"]
    assert sent["local"]["bytes_ratio"] < sent["none"]["bytes_ratio"]
    assert sent["local"]["steps_per_sync"] == STEPS / 2 and sent["local"]["seconds_per_sync"] > 0
    assert "steps_per_sync" not in sent["none"]
