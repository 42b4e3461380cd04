"""Custom metrics on two workers: their rows in custom loops, and errors.

`tests/parity` compares them with one process in `fit` and `evaluate`.
"""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.parametrize("engine", ["multiworker"])]

SETUP = """
    import json, sys
    from pathlib import Path
    sys.path.append(str(Path(sys.path[0]).parent))
    import keras, numpy as np, tensorflow as tf
    import tfdistkit
    from parity import own_metrics as own
    strategy = tfdistkit.strategy(engine, timeout_s=100)
    y = np.linspace(-1, 1, 5).astype("float32")[:, None]
    p = np.cos(7 * y)
"""


def output(printed: list[str]) -> dict:
    """Returns the output of the ranks, which is the same on all."""
    assert len({line.splitlines()[-1] for line in printed}) == 1, printed
    return json.loads(printed[0].splitlines()[-1])


LOOP = """
    def made():
        additive = tfdistkit.additive_metric(type("Additive", (own.TruePositives,), {}))
        return [own.TruePositives(), own.Extremes(), own.MeanOfBatches(), additive(), own.RootOfMean()]
    def state(metrics):
        return [np.ravel(keras.ops.convert_to_numpy(v)).tolist() for m in metrics for v in m.variables]
    with strategy.scope():
        metrics = made()
    def update(batch):
        for metric in metrics:
            metric.update_state(*batch)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((y, p)).batch(3))
    step = tf.function(lambda batch: strategy.run(update, args=(batch,)))
    for batch in batches:
        step(batch)
    alone = made()
    for start in (0, 3):
        for metric in alone:
            metric.update_state(y[start:start + 3], p[start:start + 3])
    results = [float(m.result()) for m in metrics if not isinstance(m, own.Extremes)]
    print(json.dumps(dict(found=state(metrics), alone=state(alone), results=results,
                          of_alone=[float(m.result()) for m in alone if not isinstance(m, own.Extremes)])))
"""


@pytest.mark.part(LOOP, setup=SETUP)
def test_a_custom_loop_equals_one_process(printed: list[str]) -> None:
    found = output(printed)
    assert sum(found["found"], []) == pytest.approx(sum(found["alone"], []), rel=1e-6)
    assert found["results"] == pytest.approx(found["of_alone"], rel=1e-6)


ROWS = """
    from tfdistkit.strategies.sync import step as steps
    from tfdistkit.strategies.metrics.gathered_rows import gather_rows
    from tfdistkit.strategies.metrics.metric_updates import hooked_update
    kinds = ["float16", "bfloat16", "float32", "float64", "int8", "uint16", "int64", "uint64", "bool", "complex64"]
    numbers = tf.constant([[-0.0, 1.5], [3.25, 4.0], [0.0, 7.0]])
    def gathered(x, y):
        step = steps.current()
        return gather_rows(step, [x, *(tf.cast(y, kind) for kind in kinds), x[:0]])
    sizes = [[3, 0], [2, 1], [0, 3]]
    same = []
    for size in sizes:
        first = sum(size[:rank])
        own_part = numbers[first:first + size[rank]]
        x, *rest, nothing = strategy.run(tf.function(gathered), args=(own_part, own_part))
        same.append(all(bool(tf.reduce_all(tf.equal(r, tf.cast(numbers, k)))) for r, k in zip(rest, kinds)))
        same.append(bool(tf.reduce_all(tf.equal(tf.bitcast(x, tf.int32), tf.bitcast(numbers, tf.int32)))))
        same.append(nothing.shape[0] == 0)
    class Lengths(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        def update_state(self, y, p):
            weights = tf.range(y.nrows(), dtype=tf.int64)
            self.total.assign(tf.cast(tf.reduce_sum(weights * y.row_lengths()), "float32") + tf.reduce_sum(y))
        def result(self):
            return self.total
    with strategy.scope():
        lengths = Lengths()
    rows = tf.ragged.constant([[1.0], [], [2.0, 3.0], [4.0], [5.0, 6.0, 7.0]])
    part = rows[:3] if rank == 0 else rows[3:]
    strategy.run(tf.function(lambda y: lengths.update_state(y, y)), args=(part,))
    print(json.dumps(dict(same=same, lengths=float(lengths.result()))))
"""


@pytest.mark.part(ROWS, setup=SETUP)
def test_rows_of_every_dtype_are_gathered_bitwise(printed: list[str]) -> None:
    found = output(printed)
    assert found["same"] == [True] * 9
    assert found["lengths"] == 2 * 2 + 3 * 1 + 4 * 3 + 28


REFUSED = """
    errors = {}
    class OfStrings(own.TruePositives):
        def update_state(self, y, p, sample_weight=None):
            super().update_state(tf.strings.to_number(tf.as_string(y)), p)
    outside = keras.metrics.AUC()
    class Words(keras.Sequential):
        def train_step(self, data):
            self.words.update_state(tf.as_string(data[1]), data[1])
            return super().train_step(data)
    for name in ("outside", "strings"):
        with strategy.scope():
            model = Words([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
            model.words = OfStrings()
        if name == "outside":
            model.train_step = lambda data: keras.Model.train_step(model, data)
        try:
            with strategy.scope():
                model.compile("sgd", "mse", metrics=[outside] if name == "outside" else None)
            model.fit(p, np.abs(y), batch_size=5, verbose=0)
        except tfdistkit.errors.UnsupportedError as error:
            errors[name] = str(error)
    print(json.dumps(errors))
"""


@pytest.mark.part(REFUSED, setup=SETUP)
def test_invalid_metrics_are_errors(printed: list[str]) -> None:
    errors = output(printed)
    assert "A metric must be made in the scope" in errors["outside"] and "the AUC" in errors["outside"]
    assert "a tensor of string" in errors["strings"] and "Turn strings into numbers" in errors["strings"]
