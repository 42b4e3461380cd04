"""Tests behaviour of Keras and TensorFlow that tfdistkit relies on and that no name shows, such as the order of calls.

Each canary is a function that tests one behaviour, in milliseconds, without side effects: it draws no random numbers
and uses up no layer names. Tests run all of them; a process runs them where Keras or TensorFlow is newer than tested.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit import supported
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api, private_lookup


def check_behaviour() -> None:
    """Runs all canaries.

    Raises:
        UnsupportedError: if a behaviour differs from that of the tested versions; names the first of them.
    """
    for canary in CANARIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of Keras, where an epoch ends.
            is_as_expected = canary()
        if not is_as_expected:
            raise UnsupportedError(
                explain(
                    f"TensorFlow {tf.__version__} with Keras {keras.__version__} behaves differently from the tested "
                    f"versions, and results would be wrong: {canary.__doc__}",
                    expected=f"Keras {supported.range_text(supported.KERAS)} and TensorFlow "
                    f"{supported.range_text(supported.TENSORFLOW)}",
                    do=f"Install tested versions: {supported.INSTALL_TENSORFLOW}",
                )
            )


def _a_model(**options: Any) -> keras.Model:
    """Returns y = w x for rows of one number; everything has a name of its own and a constant start."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="canary_layer")
    model = keras.Sequential([keras.Input((1,), name="canary_input"), layer], name="canary")
    options = {"run_eagerly": True, "loss": keras.losses.MeanSquaredError(name="canary_loss"), **options}
    model.compile(keras.optimizers.SGD(0.1, name="canary_sgd"), **options)
    return model


def _dataset(rows: int) -> tf.data.Dataset:
    x: Any = np.ones((rows, 1), "float32")
    return tf.data.Dataset.from_tensor_slices((x, 3.0 * x)).batch(1)


def _iterator(dataset: tf.data.Dataset) -> Any:
    epoch_iterator, _, _ = private_lookup.resolve("epoch_iterator")
    return epoch_iterator(x=dataset, shuffle=False, distribute_strategy=tf.distribute.get_strategy())


def _read(iterator: Any) -> int:
    """Reads an epoch as `fit` does; returns the number of its batches."""
    batches = 0
    with iterator.catch_stop_iteration():
        for *_, data in iterator:  # Older versions count in steps, newer in their first and last step.
            next(data)
            batches += 1
    return batches


def an_epoch_ends_with_its_data() -> bool:
    """An epoch of unknown length ends when its data does, and says so by `catch_stop_iteration`."""
    iterator = _iterator(_dataset(3))
    made: list[Any] = []
    dataset = private_api.dataset_of(iterator)

    class Counted:
        def __iter__(self) -> Any:
            made.append(self)
            return iter(dataset)

    private_api.let_data_end_epoch(iterator, Counted())
    # One iterator for the epoch, and the one that Keras makes at its end where it knows the number of batches.
    return _read(iterator) == 3 and len(made) == 2


def keras_counts_the_batches_of_an_epoch() -> bool:
    """Keras notes how long data of unknown length is when its first epoch ends, and not before."""
    iterator = _iterator(_dataset(3).filter(lambda x, y: True))
    before = private_api.num_batches_of(iterator)
    return before is None and _read(iterator) == 3 and private_api.num_batches_of(iterator) is not None


def fit_makes_one_function_and_calls_it_for_each_step() -> bool:
    """`fit` makes its train function by `_make_function`, once, and calls it with an iterator for each step."""
    owner, name, original = private_lookup.resolve("make_function")
    calls: list[str] = []

    class Watched(owner):  # type: ignore[misc, valid-type]
        def _make_function(self, step_function: Any) -> Any:
            calls.append(step_function.__name__)
            function = original(self, step_function)

            def counted(iterator: Any) -> Any:
                calls.append("step" if isinstance(iterator, tf.data.Iterator) else "other")
                return function(iterator)

            return counted

    model = _a_model()
    model.__class__ = type("WatchedCanary", (type(model), Watched), {name: Watched._make_function})
    model.fit(_dataset(2), epochs=2, shuffle=False, verbose=0)
    return calls[0] == "train_step" and calls.count("train_step") == 1 and calls.count("step") >= 4


def gradients_meet_once_and_after_they_were_clipped() -> bool:
    """Keras's `apply` clips the gradients, sums them over the replicas, and updates: so they are summed before it."""
    seen: list[str] = []

    class Watched(keras.optimizers.SGD):
        def _clip_gradients(self, grads: Any) -> Any:
            seen.append("clip")
            return super()._clip_gradients(grads)

        def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
            seen.append("sum")
            return super()._all_reduce_sum_gradients(grads_and_vars)

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            seen.append("update")
            super().update_step(gradient, variable, learning_rate)

    variable = keras.Variable([1.0, 1.0], name="canary_variable")
    Watched(0.1, clipnorm=1.0, name="canary_sgd").apply([tf.constant([3.0, 4.0])], [variable])
    return seen == ["clip", "sum", "update"]


def assignments_go_through_one_method() -> bool:
    """Every assignment to a Keras variable calls `_direct_assign`, and every read `value`."""
    owner, name, original = private_lookup.resolve("variable_assign")
    variable, seen = keras.Variable(1.0, name="canary_variable"), []

    class Watched(owner):  # type: ignore[misc, valid-type]
        def _direct_assign(self, value: Any) -> None:
            seen.append(float(value))
            original(self, value)

    variable.__class__ = type("WatchedVariable", (Watched, type(variable)), {name: Watched._direct_assign})
    variable.assign(2.0)
    variable.assign_add(1.0)
    variable.assign_sub(0.5)
    return seen == [2.0, 3.0, 2.5] and float(variable.value) == 2.5


def the_loss_is_a_mean_weighted_by_rows() -> bool:
    """The loss in the logs of `fit` is the mean over the rows of the epoch, whatever the sizes of its batches."""
    x = np.array([[1.0], [2.0], [4.0]], "float32")
    logs = _a_model().evaluate(tf.data.Dataset.from_tensor_slices((x, 0.0 * x)).batch(2), verbose=0, return_dict=True)
    return bool(abs(logs["loss"] - 7.0) < 1e-6)


CANARIES: tuple[Callable[[], bool], ...] = (
    an_epoch_ends_with_its_data,
    keras_counts_the_batches_of_an_epoch,
    fit_makes_one_function_and_calls_it_for_each_step,
    gradients_meet_once_and_after_they_were_clipped,
    assignments_go_through_one_method,
    the_loss_is_a_mean_weighted_by_rows,
)
