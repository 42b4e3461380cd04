"""Compares custom metrics under `parameter_server` with one process."""

from __future__ import annotations

import numpy as np
import pytest
from coordinator_setup import SETUP, last_report

pytestmark = [pytest.mark.tensorflow, pytest.mark.parametrize("engine", ["parameter_server"])]

OWN_METRICS = """
    import os, sys
    os.environ["TFDISTKIT_OWN_MODELS"] = "1"  # For the reference model of the coordinator.
    from pathlib import Path
    sys.path.append(str(Path(sys.path[0]).parent))
    from parity import models, own_metrics as own
    from parity.data import make_data
    def metrics():
        return [own.TruePositives(), own.Extremes(), own.MeanOfBatches(), own.CenteredError(name="centered"),
                own.RootOfMean(name="root"), own.function("row_error"), own.function("correlation")]
    def results(scope, kind, steps=1):
        keras.utils.set_random_seed(3)
        with scope:
            model = {"outputs": models.two_outputs, "own logs": own.OwnLogs, "trackers": own.Trackers}.get(
                kind, models.mlp)()
            if kind == "outputs":
                losses, of_output = {"one": "mse", "two": "mae"}, {"one": [own.TruePositives()], "two": ["mae"]}
                model.compile(keras.optimizers.SGD(0.0), losses, metrics=of_output, steps_per_execution=steps)
            else:
                given = {} if kind in ("own logs", "trackers") else {"loss": "mse", "metrics": metrics()}
                model.compile(keras.optimizers.SGD(0.0), steps_per_execution=steps, **given)
        rows = make_data("named" if kind == "outputs" else "numbers", 70)
        batches = tf.data.Dataset.from_tensor_slices(rows).batch(16)
        if kind == "of workers" and model.distribute_strategy is strategy:
            def of_worker(context):
                own_part = tf.data.Dataset.from_tensor_slices(make_data("numbers", 70))
                return own_part.shard(context.num_input_pipelines, context.input_pipeline_id).batch(16)
            batches = strategy.distribute_datasets_from_function(of_worker)
        history = model.fit(batches, epochs=2, verbose=0).history
        found = {name: [float(np.ravel(v)[0]) for v in values] for name, values in history.items()}
        found.update({"test " + n: float(np.ravel(v)[0]) for n, v in model.evaluate(
            batches, verbose=0, return_dict=True).items()})
        found["state"] = [float(np.sum(keras.ops.convert_to_numpy(v))) for v in model.metrics_variables]
        return found
    import contextlib
    found = {}
    for kind, steps in (("metrics", 1), ("metrics", 3), ("outputs", 1), ("trackers", 1), ("own logs", 1),
                        ("of workers", 1), ("of workers", 3)):
        pair = [results(scope, kind, steps) for scope in (contextlib.nullcontext(), strategy.scope())]
        found[f"{kind} {steps}"] = pair
    report(**found)
"""


@pytest.mark.part(OWN_METRICS, setup=SETUP)
def test_custom_metrics_are_updated_in_batch_order(printed: list[str]) -> None:
    """Workers run the batches in any order and concurrently; weights do not change."""
    found = last_report(printed)
    assert len(found) == 7
    for kind, (alone, together) in found.items():
        names = ["extremes_largest", "extremes_smallest"] if "workers" in kind else alone
        if kind == "own logs 1":
            names = ["state"]  # Its logs are those of one step, which does not include concurrent steps.
        for name in names:
            assert together[name] == pytest.approx(alone[name], rel=2e-6, abs=1e-6), (kind, name)


# Every batch is the same one, for the logs of an epoch are those of whichever step was the last.
OWN_LOSS = """
    import contextlib, os
    os.environ["TFDISTKIT_OWN_MODELS"] = "1"  # For the reference model of the coordinator.
    class OwnLoss(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer, self.error = keras.layers.Dense(1, kernel_initializer="ones"), keras.metrics.Mean(name="error")
        def call(self, x):
            return self.layer(x)
        def test_step(self, data):
            x, y = data
            loss = tf.reduce_mean((self(x) - y) ** 2)
            self.error.update_state(tf.abs(self(x) - y))
            return {"loss": loss, "double": 2.0 * loss, "error": self.error.result()}
        train_step = test_step
    def results(scope):
        with scope:
            model = OwnLoss()
            model.compile()
        x = tf.tile([[1.0, 2.0], [3.0, 5.0], [2.0, 2.0], [0.0, 1.0]], [6, 1])
        data = tf.data.Dataset.from_tensor_slices((x, tf.ones([24, 1]))).batch(4)
        history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
        tested = model.evaluate(data, verbose=0, return_dict=True)
        return {**history, **{f"test {name}": value for name, value in tested.items()}}
    report(alone=results(contextlib.nullcontext()), together=results(strategy.scope()))
"""


@pytest.mark.part(OWN_LOSS, setup=SETUP)
def test_a_loss_in_the_logs_of_a_step_is_not_that_of_an_idle_metric(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["alone"]["loss"][0] > 1.0
    assert set(found["together"]) == set(found["alone"])
    for name, values in found["alone"].items():
        assert found["together"][name] == pytest.approx(values, rel=1e-6), name


# The callback waits for each step, so that two workers train one after the other, as one process does.
BETWEEN = """
    import contextlib, os
    os.environ["TFDISTKIT_OWN_MODELS"] = "1"  # For the reference model of the coordinator.
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.most = self.add_variable((), "zeros", name="most")
        def update_state(self, error, sample_weight=None):
            self.most.assign(tf.maximum(self.most, tf.reduce_max(error)))
        def result(self):
            return self.most * 1.0
    class Relative(keras.Model):
        "Its loss is divided by the mean of the losses so far."
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1, kernel_initializer="ones")
            self.tracker, self.largest = keras.metrics.Mean(name="loss"), Largest()
        def call(self, x):
            return self.layer(x)
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                error = (self(x) - y) ** 2
                loss = tf.reduce_mean(error)
                self.tracker.update_state(loss)
                relative = loss / (1.0 + self.tracker.result())
            gradients = tape.gradient(relative, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.largest.update_state(error)
            return {"loss": self.tracker.result(), "largest": self.largest.result()}
    class Reads(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []
        def on_train_batch_end(self, batch, logs=None):
            self.seen.append([float(value) for value in self.model.get_metrics_result().values()])
            if batch % 5 == 4:
                self.model.reset_metrics()
    def results(scope, model):
        with scope:
            model = model()
        reads = Reads()
        history = model.fit(features, labels, batch_size=9, epochs=2, shuffle=False, verbose=0, callbacks=[reads])
        return {"seen": reads.seen, "weights": model.get_weights()[0].ravel().tolist(), **history.history}
    def relative():
        model = Relative()
        model.compile(keras.optimizers.SGD(0.1))
        return model
    def compiled():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model
    kinds = {"relative": relative, "compiled": compiled}
    report(**{kind: [results(scope, make) for scope in (contextlib.nullcontext(), strategy.scope())]
              for kind, make in kinds.items()})
"""


@pytest.mark.part(BETWEEN, setup=SETUP)
def test_metrics_are_read_and_reset_between_steps(printed: list[str]) -> None:
    for kind, (alone, together) in last_report(printed).items():
        assert len(alone["seen"]) == 20
        for name, values in alone.items():
            assert np.ravel(together[name]) == pytest.approx(np.ravel(values), rel=1e-5), (kind, name)
