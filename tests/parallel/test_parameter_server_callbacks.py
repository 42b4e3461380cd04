"""Keras's callbacks and ours under `parameter_server`: they work, or warn that they have no effect."""

from __future__ import annotations

import pytest
from coordinator_setup import ROWS, SETUP, STEPS, last_report

pytestmark = [pytest.mark.tensorflow, pytest.mark.parametrize("engine", ["parameter_server"])]

FILES = """
    import importlib.util, os
    model = make(optimizer=lambda: keras.optimizers.Adam(0.05))
    def path(name):
        return str(folder / name)
    class Weights(keras.callbacks.Callback):
        "What the model was at the end of each epoch."
        def on_train_begin(self, logs=None):
            self.at_end = []
        def on_epoch_end(self, epoch, logs=None):
            self.at_end.append([w.copy() for w in self.model.get_weights()])
    weights, has_board = Weights(), importlib.util.find_spec("tensorboard") is not None
    seen = train(model, x, y, batch_size=BATCH, validation_data=(x[:30], y[:30]), callbacks=[
        weights,
        keras.callbacks.ModelCheckpoint(path("epoch{epoch}.weights.h5"), save_weights_only=True),
        tfdistkit.callbacks.ChiefCheckpoint(path("ours{epoch}.weights.h5"), save_weights_only=True),
        tfdistkit.callbacks.ChiefCheckpoint(path("best.keras"), save_best_only=True),
        keras.callbacks.CSVLogger(path("log.csv")),
        tfdistkit.callbacks.ChiefOnly(keras.callbacks.CSVLogger(path("chief.csv"))),
        *(keras.callbacks.TensorBoard(path("board")) for _ in range(has_board)),
        keras.callbacks.BackupAndRestore(path("backup")),
        keras.callbacks.TerminateOnNaN(),
    ])
    def equal(file, epoch):
        model.load_weights(path(file))
        return all((a == b).all() for a, b in zip(model.get_weights(), weights.at_end[epoch]))
    same = [equal(f"{kind}{epoch + 1}.weights.h5", epoch) for kind in ("epoch", "ours") for epoch in range(3)]
    rows = [line.split(",") for line in open(path("log.csv")).read().splitlines()]
    board = [name for _, _, names in os.walk(path("board")) for name in names]
    report(seen=seen, files=sorted(os.listdir(folder)), same=same, logged=rows, board=len(board) == 2 * has_board,
         chief=open(path("chief.csv")).read() == open(path("log.csv")).read())
"""


@pytest.mark.part(FILES, setup=SETUP)
def test_callbacks_that_write_files(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["seen"]["once"] == [ROWS] * 3 and found["seen"]["val_once"] == [30] * 3
    written = {f"{kind}{epoch}.weights.h5" for kind in ("epoch", "ours") for epoch in (1, 2, 3)}
    assert written | {"best.keras", "log.csv", "chief.csv"} <= set(found["files"])
    assert found["same"] == [True] * 6 and found["board"] and found["chief"]
    names, *rows = found["logged"]
    assert [float(row[names.index("seen")]) for row in rows] == [ROWS] * 3
    assert [float(row[names.index("loss")]) for row in rows] == found["seen"]["loss"]


STEERING = """
    def worse(epoch, logs):
        "A number for others to monitor, which gets worse after the second epoch."
        logs["watched"] = [3.0, 2.0, 2.5, 2.6, 2.7, 2.8][epoch]
    watch = keras.callbacks.LambdaCallback(on_epoch_end=worse)
    early = keras.callbacks.EarlyStopping("watched", mode="min", patience=2, restore_best_weights=True)
    model = make()
    stopped = train(model, x, y, batch_size=BATCH, epochs=6, callbacks=[watch, early])
    plateau = keras.callbacks.ReduceLROnPlateau("watched", mode="min", factor=0.1, patience=2)
    reduced = train(make(), x, y, batch_size=BATCH, epochs=6, callbacks=[watch, plateau])
    scheduled = train(make(), x, y, batch_size=BATCH, callbacks=[
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))])
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 4
    halted = train(make(), x, y, batch_size=BATCH, callbacks=[Stop()])
    def nan(y, p):
        return crossentropy(y, p) * float("nan")
    with strategy.scope():
        broken = sequential()
        broken.compile("sgd", nan)
    terminated = train(broken, x, y, batch_size=BATCH, callbacks=[keras.callbacks.TerminateOnNaN()])
    ema = make(optimizer=lambda: keras.optimizers.SGD(0.05, use_ema=True))
    swapped = train(ema, x, y, batch_size=BATCH, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    report(stopped=stopped, reduced=reduced, scheduled=scheduled, halted=halted, terminated=terminated, swapped=swapped)
"""


@pytest.mark.part(STEERING, setup=SETUP)
def test_callbacks_that_control_training(printed: list[str]) -> None:
    found = last_report(printed)
    assert len(found["stopped"]["loss"]) == 4 and found["stopped"]["steps"] == 4 * STEPS
    assert found["reduced"]["learning_rate"] == pytest.approx([0.05] * 4 + [0.005] * 2, rel=1e-5)
    assert found["scheduled"]["learning_rate"] == pytest.approx([0.1, 0.05, 0.1 / 3], rel=1e-5)
    # Keras has the logs of finished steps: the steps in flight are finished, and counted.
    assert found["halted"]["steps"] == 5 and found["halted"]["seen"] == [40] and len(found["halted"]["loss"]) == 1
    assert 1 <= found["terminated"]["steps"] < 3 * STEPS
    assert found["swapped"]["once"] == [ROWS] * 3


OURS = """
    from tfdistkit.callbacks import BroadcastVariables, LearningRateScale, LearningRateWarmup, MetricAverage
    from tfdistkit.callbacks import StopTogether
    import logging
    lines = []
    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
    logging.getLogger("tfdistkit").addHandler(Keep())
    seen = train(make(), x, y, batch_size=BATCH, callbacks=[
        BroadcastVariables(), MetricAverage(), LearningRateWarmup(warmup_epochs=2), StopTogether()])
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True
    stopped = train(make(), x, y, batch_size=BATCH, callbacks=[StopTogether(Stop())])
    scaled = train(make(), x, y, batch_size=BATCH, callbacks=[LearningRateScale(lambda epoch: 1 / (1 + epoch))])
    report(seen=seen, stopped=stopped, scaled=scaled, lines=lines)
"""


@pytest.mark.part(OURS, setup=SETUP)
def test_callbacks_of_tfdistkit_for_several_ranks(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["seen"]["once"] == [ROWS] * 3 and found["seen"]["steps"] == 3 * STEPS
    assert found["stopped"]["steps"] == STEPS
    printed_lines = "\n".join(found["lines"])
    for name in ("BroadcastVariables", "MetricAverage", "LearningRateWarmup", "StopTogether"):
        assert f"{name} has nothing to do" in printed_lines
    assert found["scaled"]["learning_rate"] == pytest.approx([0.05, 0.025, 0.05 / 3], rel=1e-5)


IN_THE_MIDDLE = """
    found = []
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                found.append(self.model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True))
    seen = train(plain(), x, y, batch_size=BATCH, callbacks=[Evaluate()])
    other = make()
    class EvaluateOther(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                other.evaluate(x, y, batch_size=BATCH, verbose=0)
    beside = train(plain(), x, y, batch_size=BATCH, callbacks=[EvaluateOther()])
    report(evaluated=found, beside=beside["seen"], **seen)
"""


@pytest.mark.part(IN_THE_MIDDLE, setup=SETUP)
def test_an_evaluation_in_the_middle_of_an_epoch(printed: list[str]) -> None:
    found = last_report(printed)
    assert [one["once"] for one in found["evaluated"]] == [ROWS] * 3 == [one["seen"] for one in found["evaluated"]]
    assert found["steps"] == 3 * STEPS and found["used"] == [3] * ROWS
    # As in Keras, the evaluation resets the metrics of the epoch.
    assert found["seen"] == [ROWS + ROWS - 6 * 8] * 3
    assert found["beside"] == [ROWS] * 3  # That of another model does not.


TIMED = """
    import time
    from tensorflow.python.data.experimental.ops import testing
    SHARES = ("computing", "communication", "input", "callbacks")
    def timed(data, *callbacks, model=None, **given):
        timer = tfdistkit.callbacks.StepTimer(verbose=0)
        seen = train(model or make(), data, callbacks=[*callbacks, timer], **given)
        return {name: seen[name] for name in ("once", "seen", "examples_per_second", *SHARES)}

    def slow(numbers):
        time.sleep(0.05)
        return numbers
    slow_data = data.batch(BATCH).map(
        lambda x, y: (tf.ensure_shape(tf.numpy_function(slow, [x], tf.float32), [None, 5]), y))
    sleep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.05))
    def of_own(context):
        own = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(BATCH).apply(testing.sleep(50_000))  # Python functions do not run on workers.
    found = {
        "arrays": timed(x, y=y, batch_size=BATCH, model=make(steps_per_execution=3)),
        "input": timed(slow_data),
        "callbacks": timed(x, sleep, y=y, batch_size=BATCH),
        "own": timed(strategy.distribute_datasets_from_function(of_own)),
    }
    report(**found)
"""


@pytest.mark.part(TIMED, setup=SETUP)
def test_the_timer_reports_the_waits_of_workers(printed: list[str]) -> None:
    found = last_report(printed)
    for kind, seen in found.items():
        assert seen["once"] == seen["seen"] == [ROWS] * 3, kind
        for epoch in range(3):
            shares = [seen[share][epoch] for share in ("computing", "communication", "input", "callbacks")]
            assert min(shares) >= 0 and sum(shares) == pytest.approx(100), (kind, seen)
        assert seen["communication"][2] > 0 and seen["computing"][2] > 0
    # Each of the batches takes 0.05 s to come, or to be looked at: its share is larger than where it does not. What
    # the rest takes is the machine's business.
    cases = {"input": ("input", "callbacks", 1), "callbacks": ("callbacks", "input", 1)}
    cases["own"] = ("input", "callbacks", 2)
    for kind, (held_up, elsewhere, at_once) in cases.items():
        seen = found[kind]
        assert seen[held_up][2] > found[elsewhere][held_up][2], found
        assert 0 < seen["examples_per_second"][2] < at_once * 8 / 0.05, seen


RESUMED = """
    class Broken(Exception):
        pass
    class BreakAfter(keras.callbacks.Callback):
        "After so many steps of a run; it keeps the first logs."
        def __init__(self, executions):
            super().__init__()
            self.left, self.first = executions, None
        def on_train_batch_end(self, batch, logs=None):
            self.first = self.first or [batch, logs["seen"]]
            self.left -= 1
            if not self.left:
                raise Broken
        def get_state(self):
            return None
        def set_state(self, state):
            pass

    def run(kind, executions=0):
        keras.utils.set_random_seed(7)
        model, end = make(steps_per_execution=1 if kind == "arrays" else 3), BreakAfter(executions)
        given = dict(x=x, y=y, batch_size=BATCH) if kind == "arrays" else dict(x=data.shuffle(N).batch(BATCH))
        backup = tfdistkit.callbacks.BackupAndResume(folder / kind, save_freq=6)
        try:
            seen = train(model, callbacks=[backup, end], **given)
        except Broken:
            return {"first": end.first}
        return {**seen, "first": end.first, "steps": int(model.optimizer.iterations)}

    found = {}
    for kind, first, second in (("arrays", 8, 15), ("dataset", 3, 5)):
        found[kind] = [run(kind, first), run(kind, second), run(kind)]
        assert not (folder / kind).exists()
    try:
        own = strategy.distribute_datasets_from_function(
            lambda context: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
        make().fit(own, callbacks=[tfdistkit.callbacks.BackupAndResume(folder / "refused")])
    except tfdistkit.errors.UnsupportedError as error:
        found["refused"] = str(error)
    report(**found)
"""


@pytest.mark.part(RESUMED, setup=SETUP)
def test_training_that_was_broken_off_goes_on(printed: list[str]) -> None:
    found = last_report(printed)
    for kind, each in (("arrays", 1), ("dataset", 3)):
        first, second, last = found[kind]
        assert first["first"][0] == each - 1
        # Backups after 6 steps of the first run, and 12 of the second, which are 6 of the second epoch.
        assert [one["first"][0] for one in (second, last)] == [5 + each] * 2
        assert all(one["first"][1] > 6 * 8 for one in (second, last)), "what was counted before is in the logs"
        assert last["seen"] == last["once"] == [ROWS] * 3, "the history of all epochs"
        assert last["steps"] == 3 * STEPS and last["used"] == [3] * ROWS
    assert "must have data that the coordinator reads" in found["refused"]


# Callbacks that read what the steps before have written, or write what the steps after read: each compared with one
# process, here in the coordinator, without the strategy.
IN_ORDER = """
    class Penalized(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, y_pred, sample_weight, training) + self.beta * tf.reduce_mean(y_pred ** 2)
    def model_of(scope):
        with scope:
            inputs = keras.Input((5,))
            model = Penalized(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, activation="tanh")(inputs)))
            model.beta = tf.Variable(0.0, trainable=False)
            model.mean = [keras.Variable(w, trainable=False) for w in model.trainable_variables]
            model.compile(keras.optimizers.Adam(0.05), lambda y, p: keras.losses.mean_squared_error(y[:, :1], p))
        return model
    class AfterEach(keras.callbacks.Callback):
        def __init__(self, change):
            super().__init__()
            self.change = change
        def on_train_batch_end(self, batch, logs=None):
            self.change(self.model)
    def clip(model):
        for weight in model.trainable_variables:
            weight.assign(keras.ops.clip(weight, -0.2, 0.2))
    def anneal(model):
        model.beta.assign_add(0.1)
    def anneal_by_steps(model):
        model.beta.assign(0.1 * tf.cast(model.optimizer.iterations.value, tf.float32))
    def average(model):
        for mean, weight in zip(model.mean, model.trainable_variables):
            mean.assign(0.8 * mean + 0.2 * weight)
    def decay(model):
        model.optimizer.learning_rate.assign(0.05 / (1 + float(keras.ops.convert_to_numpy(model.optimizer.iterations))))
    def shrink(model):
        model.set_weights([0.9 * weight for weight in model.get_weights()])
    def shift(model):
        model.beta.assign(tf.reduce_mean(model.predict_on_batch(x[:4])))
    import contextlib
    apart = {}
    for change in (clip, anneal, anneal_by_steps, average, decay, shrink, shift):
        here, there = model_of(contextlib.nullcontext()), model_of(strategy.scope())
        there.set_weights(here.get_weights())
        for model in (here, there):
            model.fit(data.batch(BATCH), epochs=2, verbose=0, callbacks=[AfterEach(change)])
        own, of_job = ([*m.get_weights(), m.beta.numpy(), *(w.numpy() for w in m.mean)] for m in (here, there))
        apart[change.__name__] = max(float(np.abs(a - b).max()) for a, b in zip(own, of_job, strict=True))
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(make(run_eagerly=True), x, y, batch_size=BATCH, epochs=1)
    report(apart=apart, eager=[str(one.message)[:40] for one in caught if "run_eagerly=True" in str(one.message)])
"""


@pytest.mark.part(IN_ORDER, setup=SETUP)
def test_callbacks_read_and_write_variables_in_the_order_of_the_steps(printed: list[str]) -> None:
    found = last_report(printed)
    apart = found["apart"]
    assert len(found["eager"]) == 1 and found["eager"][0].startswith("Steps cannot run eagerly here")
    assert len(apart) == 7 and {name: size for name, size in apart.items() if size > 1e-6} == {}
