"""Keras's and tfdistkit's callbacks on two workers: no divergence and no hang, each alone and in any order."""

from __future__ import annotations

import pytest
from rank_jobs import OVER_ONE

pytestmark = pytest.mark.tensorflow

ON_TWO_RANKS = ["multiworker", pytest.param("horovod", marks=pytest.mark.horovod)]

TRAIN = """
    import keras, numpy as np, tensorflow as tf
    import tfdistkit
    from tfdistkit import callbacks as ours
    x = np.random.default_rng(0).normal(size=(44, 4)).astype("float32")
    y = x[:, :1] * 2

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def make(kind=keras.Model, **options):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            inputs = keras.Input((4,))
            hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4, "tanh")(inputs))
            model = kind(inputs, keras.layers.Dense(1)(hidden))
            model.compile(keras.optimizers.Adam(0.02), "mse", **options)
        return model

    def fit(model, *callbacks, epochs=4, **options):
        options = {"validation_data": (x[:12], y[:12]), **options}
        history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks), **options)
        assert ours.consistency.find_difference(model, ours.process_group.ranks_of(model)) is None
        everyone = strategy.gather(tf.constant([history.history["loss"]], tf.float64), axis=0).numpy()
        assert (everyone == everyone[0]).all(), everyone
        return history
"""

KERAS = (
    TRAIN
    + """
    early = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0, restore_best_weights=True)
    assert len(fit(make(), early).epoch) == 2 and early.stopped_epoch == 1 and early.best_weights is not None

    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)
    rates = fit(make(), plateau).history["learning_rate"]
    np.testing.assert_allclose(rates, [0.02, 0.02, 0.01, 0.005])

    board = ours.ChiefOnly(keras.callbacks.TensorBoard(folder / "board", histogram_freq=1, update_freq=2))
    csv = ours.ChiefOnly(keras.callbacks.CSVLogger(folder / "log.csv"))
    fit(make(), board, csv)
    assert (folder / "board" / "train").exists() and (folder / "board" / "validation").exists()
    lines = (folder / "log.csv").read_text().splitlines()
    assert lines[0] == "epoch,loss,val_loss" and len(lines) == 5

    model = make()
    x_with_nan = np.concatenate([x[:20], np.full((1, 4), np.nan, "float32"), x[21:]])
    history = model.fit(x_with_nan, y, batch_size=8, epochs=4, verbose=0, shuffle=False,
                        callbacks=[keras.callbacks.TerminateOnNaN()])
    assert len(history.epoch) == 1 and int(model.optimizer.iterations) == 3  # rows 16 to 23; on one rank only

    stopping = [keras.callbacks.EarlyStopping("loss", patience=9), keras.callbacks.TerminateOnNaN()]
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with strategy.scope():
        averaging = make()
        averaging.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    fit(averaging, *stopping, swap, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9))
    print("well")
"""
)

OURS = (
    TRAIN
    + """
    def all_of_ours(place):
        return {
            "backup": lambda: ours.BackupAndResume(folder / place, save_freq=2),
            "broadcast": lambda: ours.BroadcastVariables(),
            "checkpoint": lambda: ours.ChiefCheckpoint(folder / place / "{epoch}.keras", keep=2),
            "only": lambda: ours.ChiefOnly(keras.callbacks.CSVLogger(folder / f"{place}.csv")),
            "check": lambda: ours.ConsistencyCheck(every=3),
            "scale": lambda: ours.LearningRateScale(0.5, start_epoch=1),
            "warmup": lambda: ours.LearningRateWarmup(warmup_epochs=1),
            "average": lambda: ours.MetricAverage(),
            "timer": lambda: ours.StepTimer(verbose=0),
            "stop": lambda: ours.StopTogether(keras.callbacks.EarlyStopping("loss", patience=9)),
        }

    def starting_again(model):
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        weights, slots = model.get_weights(), [v.numpy() for v in model.optimizer.variables]
        def start_again():
            keras.utils.set_random_seed(2)
            model.set_weights(weights)
            for variable, value in zip(model.optimizer.variables, slots):
                variable.assign(value)
        return start_again

    # Each alone: it changes nothing but its own effect.
    model = make()
    start_again = starting_again(model)
    expected = fit(model, epochs=2).history
    for name, callback in all_of_ours("alone").items():
        start_again()
        found = fit(model, callback(), epochs=2).history
        if name not in ("scale", "warmup"):
            assert {key: found[key] for key in expected} == expected, name
    print("well")
"""
)

ANY_ORDER = (
    OURS.replace('print("well")', "")
    + """
    # All at once, in any order; with several steps per execution, and with the user's own train_step.
    import random
    chosen, losses = random.Random(3), {}
    for name, kind, options in (("plain", keras.Model, {}), ("three", keras.Model, {"steps_per_execution": 3}),
                                ("own", OwnStep, {})):
        model = make(kind, **options)
        start_again = starting_again(model)
        for turn in range(2):
            start_again()
            callbacks = [callback() for callback in all_of_ours(f"{name}{turn}").values()]
            chosen.shuffle(callbacks)
            losses.setdefault(name, []).append(fit(model, *callbacks).history["loss"])
            assert sorted(path.name for path in (folder / f"{name}{turn}").iterdir()) == ["3.keras", "4.keras"]
            assert (folder / f"{name}{turn}.csv").exists()
        assert losses[name][0] == losses[name][1], losses
    np.testing.assert_allclose(losses["three"][0], losses["plain"][0], rtol=1e-5)
    print("well")
"""
)

FAULTS = (
    TRAIN
    + """
    class Meddle(keras.callbacks.Callback):
        "Sets one number of one weight on one rank."
        def on_train_batch_end(self, batch, logs=None):
            if rank == 1 and batch == 3:
                kernel = self.model.layers[3].kernel
                value = kernel.numpy()
                value[2, 0] += 0.25
                kernel.assign(value)

    check = ours.ConsistencyCheck(every=2)
    model = make()
    name = model.layers[3].kernel.path
    for callbacks in ([Meddle(), check], [check, Meddle()]):
        model = make()
        name = model.layers[3].kernel.path
        try:
            fit(model, *callbacks)
        except tfdistkit.errors.DivergenceError as error:
            message = str(error)
        else:
            raise SystemExit("not found")
        first = 4 if callbacks[0] is not check else 6
        assert f"`{name}` is the first variable that differs: rank 1 from rank 0 by up to" in message
        assert f"after step {first} of this run" in message, message
        if first == 4:
            assert "by up to 0.25, in 1 of 4 numbers" in message, message

    # StepTimer names the rank that waits for its data.
    def slow(batch):
        import time
        time.sleep(0.2 if rank == 1 else 0.0)
        return batch
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    data = data.map(lambda x, y: (tf.numpy_function(slow, [x], tf.float32), y))
    data = data.map(lambda x, y: (tf.ensure_shape(x, [None, 4]), y))
    history = make().fit(data, epochs=3, verbose=0, callbacks=[ours.StepTimer()]).history
    for key in ("computing", "communication", "input", "callbacks"):
        assert all(0.0 <= share <= 100.0 for share in history[key]), history
    # Rank 1 waits for its data, and rank 0 for rank 1.
    assert max(history["input"]) > 25 and max(history["communication"]) > 25, history
    total = sum(history[key][-1] for key in ("computing", "communication", "input", "callbacks"))
    assert abs(total - 100) < 1e-6 and history["examples_per_second"][-1] < 90, history

    # All ranks load the chief's file.
    model = make()
    fit(model, ours.ChiefCheckpoint(folder / f"of{rank}" / "{epoch}.weights.h5", save_weights_only=True, keep=2))
    saved = model.get_weights()
    assert sorted(folder.glob("of*/*")) == [folder / "of0" / f"{epoch}.weights.h5" for epoch in (3, 4)]
    loaded = ours.load_checkpoint(folder / f"of{rank}" / "{epoch}.weights.h5", make())
    for a, b in zip(loaded.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(folder.glob("of1/*")) == []
    try:
        ours.load_checkpoint(folder / "nowhere.weights.h5", model)
    except tfdistkit.errors.CheckpointError as error:
        assert "The checkpoint must exist on at least one rank" in str(error) and f"rank {rank} on" in str(error)
    else:
        raise SystemExit("not refused")
    print("well")
"""
)


def ends_well(printed: list[str]) -> bool:
    return all(text.endswith("well\n") for text in printed)


@pytest.mark.part(KERAS)
@pytest.mark.parametrize("engine", ON_TWO_RANKS)
def test_callbacks_of_keras_neither_diverge_nor_hang(printed: list[str]) -> None:
    assert ends_well(printed)


@pytest.mark.part(ANY_ORDER)
@pytest.mark.parametrize("engine", OVER_ONE)
def test_callbacks_alone_and_together_in_any_order(printed: list[str]) -> None:
    assert ends_well(printed)


@pytest.mark.part(FAULTS)
@pytest.mark.parametrize("engine", OVER_ONE)
def test_divergence_slow_input_and_missing_files_are_found(printed: list[str]) -> None:
    assert ends_well(printed)
    lines = [line for line in printed[0].splitlines() if line.startswith("Epoch 3:")]
    assert "examples/s" in lines[0] and "% computing" in lines[0], printed[0]
    assert "Epoch 1: training waits for input on rank 1: use `prefetch`" in printed[0]
    assert not any(line.startswith("Epoch 3:") for line in printed[1].splitlines())
