"""`BroadcastVariables` and `MetricAverage` in jobs of two ranks."""

from __future__ import annotations

import pytest
from rank_jobs import ENGINES

pytestmark = pytest.mark.tensorflow

START = """
    import hashlib
    import keras, numpy as np, tensorflow as tf
    from tfdistkit.callbacks import BroadcastVariables, MetricAverage
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    y = x[:, :1] * 2

    def variables(model):
        metrics = [id(v) for v in model.metrics_variables]
        return [v for v in [*model.variables, *model.optimizer.variables] if id(v) not in metrics]

    def state(model):
        return [np.asarray(v.value.numpy()) for v in variables(model)]

    def on_both(values):
        "A digest of what the ranks hold, compared bit for bit."
        digest = hashlib.sha256(b"".join(v.tobytes() for v in values)).digest()[:24]
        both = strategy.gather(tf.constant([list(digest)], tf.int32), axis=0).numpy()
        return (both == both[0]).all()
"""

RESTORE = (
    START
    + """
    def make():
        with strategy.scope():
            layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(),
                      keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))
            model.compile(optimizer, "mse", metrics=["mae"])
            model.optimizer.build(model.trainable_variables)
        return model

    trained = make()
    trained.fit(x, y, batch_size=8, epochs=3, verbose=0)
    trained.optimizer.learning_rate = 0.02
    path = str(folder / f"{rank}.weights.h5")
    trained.save_weights(path)

    for root in (1, 0):
        restored, fresh = make(), make()
        if rank == root:
            restored.load_weights(path)
        expected = state(trained)
        loaded = state(restored)
        assert on_both(state(fresh)) and not on_both(loaded)

        class Begin(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.seen = state(self.model)
        begin = Begin()
        restored.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False,
                     callbacks=[BroadcastVariables(root_rank=root), begin])
        assert on_both(begin.seen)
        if rank == root:
            assert all((a == b).all() for a, b in zip(begin.seen, loaded))
        kinds = set()
        for one, other, variable in zip(begin.seen, expected, variables(restored)):
            if "seed" not in variable.path:  # Keras saves no seeds of layers that it did not name.
                assert (one == other).all(), variable.path
            kinds.add(str(one.dtype))
        assert kinds == {"float32", "int64"} and any("seed" in v.path for v in variables(restored)), kinds
        assert on_both(state(restored))
    print("equal")
"""
)

KINDS = (
    START
    + """
    dtypes = ["bool", "int32", "int64", "float16", "float32", "float64"]
    others = ["int8", "uint8", "int16", "uint16", "uint32", "uint64", "bfloat16"]  # TensorFlow cannot mirror all.
    def bits(dtype, seed):
        "Any bits at all: NaNs, denormals, -0.0, the largest integers."
        size = tf.as_dtype(dtype).size
        raw = np.random.default_rng(seed).integers(0, 256, size=15 * size, dtype=np.uint8)
        if dtype == "bool":
            raw %= 2
        value = raw.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(3, 5).copy()
        if dtype not in ("bool",) and not np.issubdtype(value.dtype, np.integer):
            value[0, 0], value[0, 1], value[0, 2] = -0.0, np.inf, np.nan
        return value
    def kept(dtype, shape=(3, 5)):
        return keras.Variable(np.zeros(shape), dtype=dtype, trainable=False, autocast=False)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.kept = [kept(dtype) for dtype in dtypes]
        model.scalar = kept("float64", ())
    model.empty = kept("float32", (0, 2))  # TensorFlow crashes when it mirrors one without elements.
    model.local = [kept(dtype) for dtype in others]
    held = [*model.kept, *model.local]
    assert {v.dtype for v in model.variables} == {*dtypes, *others}
    for root in (1, 0):
        for i, variable in enumerate(held):
            variable.value.assign(bits(variable.dtype, 100 * rank + i + root))
        model.scalar.assign(rank + 1 / 3)
        callback = BroadcastVariables(root_rank=root)
        callback.set_model(model)
        callback.on_train_begin()
        for i, variable in enumerate(held):
            found, expected = variable.value.numpy(), bits(variable.dtype, 100 * root + i + root)
            assert found.tobytes() == expected.tobytes(), (variable.dtype, found, expected)
        assert float(model.scalar.numpy()) == root + 1 / 3
        assert on_both(state(model))
    print("bit for bit")
"""
)

LATE = (
    START
    + """
    class TwoOptimizers(keras.Model):
        "Like a GAN: optimizers of its own, which its first step builds."
        def __init__(self):
            super().__init__()
            self.one, self.other = keras.layers.Dense(1), keras.layers.Dense(1)
            self.one_optimizer = keras.optimizers.Adam(0.01)
            self.other_optimizer = keras.optimizers.SGD(0.01, momentum=0.5)
        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                one, other = keras.ops.mean((self.one(x) - y) ** 2), keras.ops.mean((self.other(x) + y) ** 2)
            for loss, layer, optimizer in ((one, self.one, self.one_optimizer),
                                           (other, self.other, self.other_optimizer)):
                optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
            return {"loss": one}
    with strategy.scope():
        model = TwoOptimizers()
        model.compile()
    model.other_optimizer.learning_rate = 0.01 * (1 + rank)
    class Look(keras.callbacks.Callback):
        equal = []
        def on_train_batch_end(self, batch, logs=None):
            held = [*model.variables, *model.one_optimizer.variables, *model.other_optimizer.variables]
            self.equal.append(on_both([np.asarray(v.value.numpy()) for v in held]))
    look = Look()
    model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[BroadcastVariables(1), look])
    assert look.equal == [True] * 4, look.equal
    assert abs(float(keras.ops.convert_to_numpy(model.other_optimizer.learning_rate)) - 0.02) < 1e-7
    print("equal after the first batch")
"""
)

REFUSED = (
    START
    + """
    def fails(callback, model):
        callback.set_model(model)
        try:
            callback.on_train_begin()
        except Exception as error:
            return type(error).__name__ + ": " + str(error)
        return "no error"
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    message = fails(BroadcastVariables(2), model)
    assert "OptionError" in message and "0 to 1" in message, message
    message = fails(BroadcastVariables(rank), model)
    assert "UnsupportedError" in message and "root_rank=0; rank 1:" in message, message
    model.extra = keras.Variable(np.zeros(3 + rank, "float32"))
    message = fails(BroadcastVariables(0), model)
    assert "UnsupportedError" in message and "rank 1: 5 variables of 48 bytes" in message, message
    print("refused on rank", rank)
"""
)

AVERAGE = (
    START
    + """
    class Measure(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            self.loss = logs["loss"]
            logs.update({"rate": 1.0 + rank, "same": 0.1, "nan": float("nan"), f"only{rank}": 5.0, "name": str(rank)})
            logs["int"] = rank
    class After(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            self.logs = dict(logs)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    measure, after = Measure(), After()
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[measure, MetricAverage(), after])
    logs = after.logs
    assert np.isnan(logs.pop("nan"))
    expected = {"rate": 1.5, "same": 0.1, f"only{rank}": 5.0, "name": str(rank), "int": 0.5}
    assert logs == {"loss": measure.loss, **expected}, logs
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[MetricAverage()])
    print("averaged")
"""
)


on_two_ranks = pytest.mark.parametrize("engine", ENGINES)


@pytest.mark.part(RESTORE)
@on_two_ranks
def test_a_checkpoint_of_one_rank_is_broadcast(printed: list[str]) -> None:
    assert all(text.endswith("equal\n") for text in printed)


@pytest.mark.part(KINDS)
@on_two_ranks
def test_every_dtype_arrives_bit_for_bit(printed: list[str]) -> None:
    assert all(text.endswith("bit for bit\n") for text in printed)


@pytest.mark.part(LATE)
@on_two_ranks
def test_variables_of_the_first_step_are_broadcast(printed: list[str]) -> None:
    assert all(text.endswith("equal after the first batch\n") for text in printed)


@pytest.mark.part(REFUSED)
@on_two_ranks
def test_differences_are_errors_on_both(printed: list[str]) -> None:
    assert [f"refused on rank {rank}\n" in text for rank, text in enumerate(printed)] == [True, True]


@pytest.mark.part(AVERAGE)
@on_two_ranks
def test_logs_that_differ_are_averaged(printed: list[str]) -> None:
    assert all(text.endswith("averaged\n") for text in printed)
    # Once, and by one rank.
    assert [text.count("MetricAverage has nothing to do") for text in printed] == [1, 0]
