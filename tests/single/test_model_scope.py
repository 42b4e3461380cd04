"""A model, an optimizer or a metric made outside of its strategy's scope: exact results, or an error of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

DEADLINE_S = 200
OUTCOMES = {
    "in the scope": "trained",
    "compiled outside, by names": "trained",
    "built outside": "trained",
    "a frozen model of before": "trained",
    "a metric of before": "trained",
    "a layer of before that is built in the scope": "trained",
    "a helper outside, to predict": "trained",
    "another strategy of ours": "trained",
    "compiled outside, with an optimizer": "The optimizer must be made in the scope of the model's strategy",
    "an optimizer of before": "The optimizer must be made in the scope of the model's strategy",
    "a second optimizer of before": "The optimizer must be made in the scope of the model's strategy",
    "an optimizer of before in a loop": "The optimizer must be made in the scope of the model's strategy",
    "layers of before": "Trainable weights of a model must be made in the scope of its strategy",
    "called outside": "Trainable weights of a model must be made in the scope of its strategy",
    "a model of before, compiled in the scope": "`fit` needs a model that was made in the scope of the strategy",
    "a model of before, fit in the scope": "`fit` needs a model that was made in the scope of the strategy",
    "compiled in another": "`compile` must not be called in the scope of a strategy other than the model's",
    "fit in another": "`fit` must not be called in the scope of a strategy other than the model's",
    "a scope of ours in a scope of ours": "A strategy's scope must not be inside the scope of another strategy",
    "a scope of TensorFlow's in ours": "A strategy's scope must not be inside the scope of another strategy",
    "a scope of ours in TensorFlow's": "A strategy's scope must not be inside the scope of another strategy",
    "a model of Keras 2": "must not be one of `tf_keras` (Keras 2)",
    "made in a scope": "must be called outside of any strategy's scope",
}

CODE = """
    import json, sys
    import keras, numpy as np, tensorflow as tf, tfdistkit
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def net(*layers):
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])

    def fit(model):
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        return [float(values[-1]) for values in history.values()]

    early, early_net, early_metric = keras.optimizers.SGD(0.1), net(), keras.metrics.MeanAbsoluteError()
    early_layer = keras.layers.Dense(3)
    compiled = net()
    compiled.compile("sgd", "mse")
    name = sys.argv[1]
    options = {} if name == "one_device" else {"devices": ["CPU:0", "CPU:1"]}
    strategy, other = (tfdistkit.strategy(name, **options) for _ in range(2))
    stock = tf.distribute.OneDeviceStrategy("CPU:0")
    own = keras.optimizers.SGD

    def scoped(make=net, optimizer=None, scope=strategy, **options):
        with strategy.scope():
            model = make()
        with scope.scope():
            model.compile(optimizer or own(0.1), "mse", **options)
        return model

    def twice():
        class Two(keras.Model):
            def compile(self, optimizer, second, **options):
                super().compile(optimizer, **options)
                self.second = second
        with strategy.scope():
            model = Two(*(lambda one: (one.inputs, one.outputs))(net()))
            model.compile(own(0.1), early, loss="mse")
        return fit(model)

    def loop():
        with strategy.scope():
            model = net()
        def replica(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x))
            early.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        tf.function(lambda x: strategy.run(replica, (x,)), autograph=False)(tf.ones((4, 4)))

    def outside(optimizer):
        with strategy.scope():
            model = net()
        model.compile(optimizer, "mse", metrics=["mae"])
        return fit(model)

    def built_outside():
        with strategy.scope():
            model, optimizer = net(), keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        with strategy.scope():
            model.compile(optimizer, "mse")
        return fit(model)

    def called():
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model(x[:2])
        fit(model)

    def frozen():
        early_net.trainable = False
        return fit(scoped(lambda: keras.Sequential([keras.Input((4,)), early_net, keras.layers.Dense(1)])))

    def compiled_in_scope():
        model = net()
        with strategy.scope():
            model.compile(own(0.1), "mse")
        fit(model)

    def fit_in_scope():
        with strategy.scope():
            compiled.fit(x, y, verbose=0)

    def fit_in_other():
        model = scoped()
        with other.scope():
            model.fit(x, y, verbose=0)

    def nested(outer, inner):
        with outer.scope(), inner.scope():
            net()

    def helper():
        model = scoped()
        first = keras.Model(model.inputs, model.layers[0].output)  # Outside of the scope: a model to inspect a layer.
        np.testing.assert_allclose(first.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)
        early_net.predict(x, verbose=0), early_net(x)
        return fit(model)

    def of_keras_2():
        # A fake: the real package needs another TensorFlow than the tests.
        import types
        legacy = sys.modules["tf_keras"] = types.ModuleType("tf_keras")
        exec("import tensorflow as tf\\ndef Dense(): return tf.Variable(1.0)", legacy.__dict__)
        try:
            with strategy.scope():
                tf.Variable(1.0)
                legacy.Dense()
        finally:
            del sys.modules["tf_keras"]

    def made_in_a_scope():
        with strategy.scope():
            tfdistkit.strategy("one_device")

    def of_other():
        with other.scope():
            model = net()
            model.compile(own(0.1), "mse")
        return fit(model)

    cases = {
        "in the scope": lambda: fit(scoped()),
        "compiled outside, by names": lambda: outside("sgd"),
        "built outside": built_outside,
        "a frozen model of before": frozen,
        "a metric of before": lambda: fit(scoped(metrics=[early_metric])),
        "a layer of before that is built in the scope": lambda: fit(scoped(lambda: net(early_layer))),
        "a helper outside, to predict": helper,
        "another strategy of ours": of_other,
        "compiled outside, with an optimizer": lambda: outside(own(0.1)),
        "an optimizer of before": lambda: fit(scoped(optimizer=early)),
        "a second optimizer of before": twice,
        "an optimizer of before in a loop": loop,
        "layers of before": lambda: fit(scoped(lambda: keras.Sequential([compiled, keras.layers.Dense(1)]))),
        "called outside": called,
        "a model of before, compiled in the scope": compiled_in_scope,
        "a model of before, fit in the scope": fit_in_scope,
        "compiled in another": lambda: scoped(scope=other),
        "fit in another": fit_in_other,
        "a scope of ours in a scope of ours": lambda: nested(strategy, other),
        "a scope of TensorFlow's in ours": lambda: nested(strategy, stock),
        "a scope of ours in TensorFlow's": lambda: nested(stock, strategy),
        "a model of Keras 2": of_keras_2,
        "made in a scope": made_in_a_scope,
    }
    found = {}
    for case, run in cases.items():
        try:
            found[case] = ["trained", run()]
        except Exception as error:
            found[case] = [type(error).__name__, str(error)]
    print(json.dumps(found))
"""


def run(name: str) -> dict[str, Any]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = textwrap.dedent(CODE)
    ended = subprocess.run(
        [sys.executable, "-c", code, name], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_parts_made_outside_of_the_scope(name: str) -> None:
    found = run(name)
    assert found.keys() == OUTCOMES.keys()
    of_replicas = {"a metric of before": "A metric must be made in the scope"} if name == "mirrored" else {}
    for case, (kind, said) in found.items():
        expected = {**OUTCOMES, **of_replicas}[case]
        if expected == "trained":
            assert kind == "trained", (case, said)
        else:
            assert kind == "UnsupportedError" and expected in said, (case, kind, said)
            assert "Expected: " in said and "\n" in said, said  # The fix is on a separate line.
    assert of_replicas or found["a metric of before"][1][0] == pytest.approx(found["in the scope"][1][0], abs=1e-6)
