"""Losses of rows that are compared with numbers of all rows: as in one process (see `test_two_devices`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdistkit

pytestmark = pytest.mark.tensorflow

# Functions of what a model computes from each row, three numbers, and of the class of each row.
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "variance": lambda z, c: ops.mean(ops.var(z, axis=0)),
    "deviation": lambda z, c: ops.mean(ops.relu(2.0 - ops.std(z, axis=0))) + ops.sum(ops.square(z - ops.mean(z, 0))),
    "correlation": lambda z, c: _correlation(z[:, 0] - ops.mean(z[:, 0]), z[:, 1] - ops.mean(z[:, 1])),
    "dot of deviations": lambda z, c: ops.dot(z[:, 0] - ops.mean(z[:, 0]), z[:, 1] * ops.max(c)) / (ops.sum(c) + 1.0),
    "whitened": lambda z, c: _whitened((z - ops.mean(z, axis=0)) / (ops.std(z, axis=0) + 0.1)),
    "shifted": lambda z, c: ops.logsumexp(ops.reshape(z, (-1,))),
    "shifted columns": lambda z, c: ops.sum(tf.reduce_logsumexp(z, axis=0)),
    "donsker_varadhan": lambda z, c: (
        ops.logsumexp(z[:, 0]) - ops.log(ops.cast(ops.shape(z)[0], "float32")) - ops.mean(z[:, 1])
    ),
    "positives": lambda z, c: ops.mean(
        tf.nn.weighted_cross_entropy_with_logits(_is_first(c), z[:, 0], ops.sum(1 - _is_first(c)) / ops.sum(c + 1.0))
    ),
    "positives by the rows": lambda z, c: ops.mean(
        ops.softplus(z[:, 0]) * (1 + _is_first(c) * (ops.cast(ops.shape(c)[0], "float32") - ops.sum(_is_first(c))))
    ),
    "classes": lambda z, c: ops.mean(ops.square(z[:, 0] - 1) * tf.gather(_rarity(tf.math.bincount(_int(c))), _int(c))),
    "four classes": lambda z, c: ops.sum(
        ops.square(z[:, 0] - 1) * ops.take(_rarity(ops.bincount(_int(c), minlength=4)), _int(c))
    ),
    "classes by a product": lambda z, c: ops.mean(
        ops.square(z) * ops.matmul(ops.one_hot(_int(c), 3), _rarity(ops.sum(ops.one_hot(_int(c), 3), 0))[:, None])
    ),
    "centroids": lambda z, c: ops.mean(
        ops.square(z - tf.gather(tf.math.unsorted_segment_mean(z, _int(c), 3), _int(c)))
    ),
    "weights of a mean": lambda z, c: ops.sum(ops.square(z[:, 0] - 1) * (c + 0.5) / ops.sum(c + 0.5)),
    "weights by the largest": lambda z, c: ops.mean(ops.square(z - 1) * ((c + 0.5) / ops.max(c + 0.5))[:, None]),
    "weights of a Keras sum": lambda z, c: _keras_sum(z, sample_weight=(c + 0.5) / ops.sum(c + 0.5)),
    "largest deviation": lambda z, c: ops.max(ops.square(z - ops.mean(z, axis=0)) * ops.exp(z)),
    "above the mean": lambda z, c: ops.sum(ops.where(z > ops.mean(z), ops.square(z), 0.0)),
    "kept above the mean": lambda z, c: ops.mean(tf.boolean_mask(ops.square(z[:, 0]), z[:, 0] >= ops.mean(z[:, 0]))),
    "assignments": lambda z, c: -ops.mean(ops.stop_gradient(_balanced(ops.exp(z))) * ops.log_softmax(z)),
}


def _correlation(a: Any, b: Any) -> Any:
    return ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b) + 0.1)


def _keras_sum(z: Any, **options: Any) -> Any:
    return keras.losses.MeanSquaredError(reduction="sum")(ops.ones_like(z), z, **options)


def _whitened(z: Any) -> Any:
    return ops.sum(ops.square(ops.matmul(ops.transpose(z), z) / ops.cast(ops.shape(z)[0], "float32") - ops.eye(3)))


def _is_first(classes: Any) -> Any:
    return ops.cast(ops.equal(classes, 0.0), "float32")


def _int(classes: Any) -> Any:
    return ops.cast(classes, "int32")


def _rarity(counts: Any) -> Any:
    return 1.0 / (1.0 + ops.cast(counts, "float32"))


def _balanced(scores: Any) -> Any:
    for _ in range(3):  # Sinkhorn and Knopp, as in SwAV.
        scores = scores / ops.sum(scores, axis=0, keepdims=True)
        scores = scores / ops.sum(scores, axis=1, keepdims=True)
    return scores


class OwnLoss(keras.Model):
    def __init__(self, loss_of: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.hidden, self.loss_of = keras.layers.Dense(3), loss_of

    def call(self, inputs: Any) -> Any:
        return self.hidden(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, classes = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self(x, training=True), classes)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class OwnComputeLoss(OwnLoss):
    """Computes the loss of Keras's step, as detectors do that divide by the number of positive anchors."""

    train_step = keras.Model.train_step

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **options: Any) -> Any:
        return self.loss_of(y_pred, y)


def _anchors(z: Any, classes: Any) -> Any:
    positives = ops.cast(ops.not_equal(ops.stack([classes, classes - 1.0, classes * 0.0], 1), 0.0), "float32")
    return _keras_sum(z[:, :, None], sample_weight=positives / ops.maximum(1.0, ops.sum(positives)))


def _noting(losses: list[float]) -> keras.callbacks.Callback:
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"])))


def _trained(strategy: Any, loss_of: Callable[[Any, Any], Any], kind: type = OwnLoss) -> tuple[list[float], list[Any]]:
    rng = np.random.default_rng(0)
    x, classes = rng.normal(size=(15, 4)).astype("float32"), rng.integers(0, 3, 15).astype("float32")
    losses: list[float] = []
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = kind(loss_of)
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.02))
        # The last batch has one row, so a replica has none.
        data = tf.data.Dataset.from_tensor_slices((x, classes)).batch(7)
        model.fit(data, epochs=2, verbose=0, callbacks=[_noting(losses)])
    return losses, model.get_weights()


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


# Their relatives are tested each time, and the fuzzer draws more.
_THOROUGH = (
    *("correlation", "dot of deviations", "shifted", "shifted columns", "positives by the rows", "four classes"),
    *("weights by the largest", "above the mean"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in _THOROUGH)) for name in LOSSES]
)
def test_equals_one_process(strategy: Any, name: str, recwarn: pytest.WarningsRecorder) -> None:
    _require_equal(strategy, LOSSES[name], OwnLoss)
    assert not [one for one in recwarn if "compares rows" in str(one.message)]


@pytest.mark.parametrize("loss_of", [_anchors, LOSSES["weights of a Keras sum"]])
def test_weights_in_a_compute_loss(strategy: Any, loss_of: Any) -> None:
    _require_equal(strategy, loss_of, OwnComputeLoss)


def _require_equal(strategy: Any, loss_of: Any, kind: type) -> None:
    losses, weights = _trained(strategy, loss_of, kind)
    expected_losses, expected_weights = _trained(tf.distribute.get_strategy(), loss_of, kind)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6, atol=1e-6)
    for found, expected in zip(weights, expected_weights):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_a_layer_normalizes_with_the_rows_of_its_replica(strategy: Any) -> None:
    def local(z: Any, _: Any) -> Any:
        return ops.mean(ops.square(normalization(z, training=True) - 1.0) * ops.exp(z))

    rows, losses = np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), list[float]()
    with strategy.scope():
        normalization = keras.layers.BatchNormalization()
        normalization.build((None, 3))
        model = OwnLoss(local)
        model.normalization = normalization
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.0))
        data = tf.data.Dataset.from_tensor_slices((rows, np.zeros(8, "float32"))).batch(8)
        model.fit(data, verbose=0, callbacks=[_noting(losses)])
    halves = [float(local(model(part), None)) for part in (rows[:4], rows[4:])]
    np.testing.assert_allclose(losses, [np.mean(halves)], rtol=1e-6)
