"""Custom metrics, and models that update metrics by hand, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops


class TruePositives(keras.metrics.Metric):
    """As in Keras's documentation of `Metric`, whose `result` is the variable."""

    def __init__(self, name: str = "positives", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.true_positives = self.add_variable(shape=(), initializer="zeros", name="true_positives")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = ops.cast(ops.logical_and(y_true > 0, y_pred > 0), self.dtype)
        if sample_weight is not None:
            values = values * ops.reshape(ops.cast(sample_weight, self.dtype), (-1, 1))
        self.true_positives.assign(self.true_positives + ops.sum(values))

    def result(self) -> Any:
        return self.true_positives


class Extremes(keras.metrics.Metric):
    """The largest error and the smallest prediction, with an initial state other than zero."""

    def __init__(self, name: str = "extremes", aggregation: str = "sum") -> None:
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", aggregation=aggregation, name="largest")
        start = keras.initializers.Constant(1e3)
        self.smallest = self.add_variable((), start, aggregation=aggregation, name="smallest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = ops.abs(y_true - y_pred)
        self.largest.assign(ops.maximum(self.largest, ops.max(errors)))
        self.smallest.assign(ops.minimum(self.smallest, ops.min(y_pred)))

    def reset_state(self) -> None:
        self.largest.assign(0.0)
        self.smallest.assign(1e3)

    def result(self) -> Any:
        return {f"{self.name}_largest": self.largest, f"{self.name}_smallest": self.smallest}


class MeanOfBatches(keras.metrics.Metric):
    """A mean of the batches' means, which contains a metric of Keras and another custom metric."""

    def __init__(self, name: str = "mean_of_batches") -> None:
        super().__init__(name=name)
        self.inner = keras.metrics.Mean()
        self.positives = TruePositives()
        self.batches = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.inner.update_state(ops.mean(ops.abs(y_true - y_pred)))
        self.positives.update_state(y_true, y_pred)
        self.batches.assign(self.batches + 1)

    def reset_state(self) -> None:
        self.inner.reset_state()
        self.positives.reset_state()
        self.batches.assign(0)

    def result(self) -> Any:
        return self.inner.result() + self.positives.result() * ops.cast(self.batches, "float32")


class CenteredError(keras.metrics.MeanSquaredError):
    """A subclass of a Keras metric that inspects the batch first."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(y_true - ops.mean(y_true, 0), y_pred, sample_weight)


class RootOfMean(keras.metrics.MeanSquaredError):
    """A metric of Keras with another result."""

    def result(self) -> Any:
        return ops.sqrt(super().result())


def function(name: str) -> Any:
    """A metric that is a function: of each row, of all rows, a mean of the rows."""

    def row_error(y: Any, predicted: Any) -> Any:
        return ops.max(ops.abs(y - predicted), -1)

    def correlation(y: Any, predicted: Any) -> Any:
        y, predicted = y - ops.mean(y), predicted - ops.mean(predicted)
        return ops.sum(y * predicted) / (ops.norm(y) * ops.norm(predicted) + 1e-3)

    def mean_error(y: Any, predicted: Any) -> Any:
        return ops.mean(ops.abs(y - predicted))

    def of_columns(y: Any, predicted: Any) -> Any:
        return ops.max(ops.abs(y - predicted), 0)

    return {f.__name__: f for f in (row_error, correlation, mean_error, of_columns)}[name]


class Trackers(keras.Model):
    """Updates its metrics by hand with numbers, sums and rows, and logs other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.by_rows = keras.metrics.Mean(name="by_rows")
        self.hits, self.steps = keras.metrics.Sum(name="hits"), keras.metrics.Sum(name="steps")
        self.extremes, self.means = Extremes(), MeanOfBatches()
        self.error = keras.metrics.MeanSquaredError(name="error")

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.by_rows, self.hits, self.steps, self.extremes, self.means, self.error]

    def logs_of(self, x: Any, y: Any, predicted: Any, loss: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(loss)
        self.by_rows.update_state(loss, sample_weight=ops.shape(x)[0])
        self.hits.update_state(ops.sum(ops.cast(y > 0, "float32")))
        self.steps.update_state(1)
        for metric in (self.extremes, self.means, self.error):
            metric.update_state(y, predicted)
        logs: dict[str, Any] = {}
        for metric in self.metrics:
            result = metric.result()
            logs.update(result if isinstance(result, dict) else {metric.name: result})
        return logs

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = ops.mean(keras.losses.mean_squared_error(y, predicted))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return self.logs_of(x, y, predicted, loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predicted = self(x)
        return self.logs_of(x, y, predicted, ops.mean(ops.square(y - predicted)))


class OwnLogs(Trackers):
    """Logs values that are not metric results: a loss, a function of a result, rows, a vector, a variable.

    Two metrics get a vector with one entry, and a mean whose weight is another sum over rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.column, self.masked = keras.metrics.Mean(name="column"), keras.metrics.Mean(name="masked")

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, self.column, self.masked]

    def logs_of(self, x: Any, y: Any, predicted: Any, loss: Any) -> dict[str, Any]:
        super().logs_of(x, y, predicted, loss)
        self.column.update_state(ops.mean(ops.square(y - predicted), 0))
        self.masked.update_state(ops.mean(ops.abs(predicted)), sample_weight=ops.sum(ops.cast(y > 0, "float32")))
        return {
            "column": self.column.result(),
            "masked": self.masked.result(),
            "loss": loss,
            "root": ops.sqrt(self.error.result()),
            "rows": ops.shape(x)[0],
            "ratio": self.loss_tracker.result() / self.error.result(),
            "columns": ops.mean(ops.square(x), 0),
            "positives": ops.sum(ops.cast(y > 0, "int32")),
            "steps_done": self.optimizer.iterations,
            "rate": self.optimizer.learning_rate,
        }


class LossAlone(Trackers):
    """Returns the loss under the name of the tracker that `compile` made, which is never updated."""

    metrics = keras.Model.metrics

    def __init__(self) -> None:
        keras.Model.__init__(self)
        self.out = layers.Dense(1)

    def logs_of(self, x: Any, y: Any, predicted: Any, loss: Any) -> dict[str, Any]:
        return {"loss": loss}


class OwnComputeMetrics(keras.Sequential):
    """Overrides `compute_metrics` as in Keras's documentation, with a number computed from two results."""

    def __init__(self) -> None:
        super().__init__([keras.Input((10,)), layers.Dense(1)])
        self.positives = TruePositives(name="own_positives")
        self.precision, self.recall = keras.metrics.Precision(name="p"), keras.metrics.Recall(name="r")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.positives.update_state(y, y_pred, sample_weight)
        labels = ops.cast(y > 0, "float32")
        for metric in (self.precision, self.recall):
            metric.update_state(labels, ops.sigmoid(y_pred))
            results[metric.name] = metric.result()
        results["own_positives"] = self.positives.result()
        results["f1"] = 2 * results["p"] * results["r"] / (results["p"] + results["r"] + 1e-7)
        return results
