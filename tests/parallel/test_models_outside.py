"""Models made outside of the strategy of a job of several processes: an error that names the line."""

from __future__ import annotations

import pytest
from rank_jobs import ENGINES

OUTSIDE = """
    import os
    import keras, numpy as np
    del os.environ["TFDISTKIT_OWN_MODELS"]
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    def net():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def error(call, *words):
        try:
            call()
        except tfdistkit.errors.UnsupportedError as error:
            for word in words:
                assert word in str(error), (word, str(error))
        else:
            raise AssertionError(f"no error with {words}")

    model = net()
    for method in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        error(lambda: getattr(model, method)(x, y), f"`{method}` needs a model that was made in the scope of this job",
              f"rank {rank} of 2", "outside of a scope at ", ".py:8;", "TFDISTKIT_OWN_MODELS=1")
    model.predict(x, verbose=0), model.predict_on_batch(x), model(x)
    try:
        os.environ["TFDISTKIT_OWN_MODELS"] = "1"
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0), model.evaluate(x, y, verbose=0)
    finally:
        del os.environ["TFDISTKIT_OWN_MODELS"]

    import tensorflow as tf
    def loop(model, optimizer, compiled, of_all=lambda gradient: gradient):
        def step():
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((model(x) - y) ** 2)
            gradients = map(of_all, tape.gradient(loss, model.trainable_weights))
            optimizer.apply_gradients(zip(gradients, model.trainable_weights))
        for _ in range(2):
            (tf.function(step) if compiled else step)()

    for compiled in (False, True):
        error(lambda: loop(net(), keras.optimizers.SGD(), compiled), "`apply` of an optimizer needs variables",
              f"rank {rank} of 2 would train these alone", "2 variables for the SGD, the first 'sequential",
              "`apply` at ", ".py:", "TFDISTKIT_OWN_MODELS=1")
    variable = tf.Variable(1.0)
    error(lambda: keras.optimizers.SGD().apply([1.0], [variable]), "would train these alone", "1 variables for the SGD")
    try:
        os.environ["TFDISTKIT_OWN_MODELS"] = "1"
        loop(net(), keras.optimizers.SGD(), False)
    finally:
        del os.environ["TFDISTKIT_OWN_MODELS"]
    # Made in the scope, but not called by `strategy.run`: nothing would be summed.
    for compiled in (False, True):
        with strategy.scope():
            own, sgd = net(), keras.optimizers.SGD()
        error(lambda: loop(own, sgd, compiled), "must be called in `strategy.run`", "would train its copy of the model",
              f"rank {rank} of 2", "`apply` at ", "TFDISTKIT_OWN_MODELS=1")
        loop(own, sgd, compiled, lambda gradient: tfdistkit.collectives.all_reduce(gradient * (1 + rank), "average"))
        everyone = tfdistkit.collectives.all_gather(own.get_weights()[0][None]).numpy()
        assert (everyone[0] == everyone[1]).all()
        strategy.run(tf.function(lambda: loop(own, sgd, False)))

    resolver = strategy.cluster_resolver  # As in TensorFlow's tutorials, to choose who saves.
    assert (resolver.task_type, resolver.task_id) == ("worker", rank), (resolver.task_type, resolver.task_id)
    assert len(resolver.cluster_spec().as_dict()["worker"]) == 2

    with strategy.scope():
        weight, plain = keras.Variable([1.0]), keras.optimizers.SGD()
        plain.build([weight])
    strategy.run(lambda: plain.apply([tf.ones([1])], [weight]))

    metric, optimizer = keras.metrics.MeanAbsoluteError(), keras.optimizers.SGD()
    with strategy.scope():
        own = net()
    error(lambda: own.compile("sgd", "mse", metrics=[metric]), "A metric must be made in the scope", "MeanAbsolute")
    error(lambda: own.compile(optimizer, "mse"), "The optimizer must be made in the scope", "SGD")

    class Tracked(keras.Model):  # As in Keras's guides: a tracker of the module.
        @property
        def metrics(self):
            return [metric]
    with strategy.scope():
        tracked = Tracked(own.inputs, own.outputs)
        tracked.compile("sgd", "mse")
    error(lambda: tracked.fit(x, y, verbose=0), "A metric must be made in the scope")
    with strategy.scope():
        own = net()
    own.compile("adam", "mse", metrics=["mae"])
    print(own.fit(x, y, verbose=0).history, own.evaluate(x, y, verbose=0))
    if engine == "multiworker":
        made = "'multiworker') after tfdistkit.strategy('multiworker') in "
        error(lambda: tfdistkit.strategy("multiworker"), "This process already has a strategy", made, "in pytest in a")
"""


@pytest.mark.part(OUTSIDE)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_outside_of_the_job_is_an_error(printed: list[str]) -> None:
    assert printed[0] == printed[1] and "loss" in printed[0]
