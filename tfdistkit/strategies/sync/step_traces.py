"""Traces the function of a step for what the dataset promises of its batches, as versions of Keras up to 3.15 do.

From Keras 3.16 on, `fit` takes a batch out of the iterator before it calls the function of the step, which is traced
for the rows of this batch; when a batch with other rows comes, it is traced once more, for any number of rows. So the
first batch of a process decides which of the traces a step runs, and TensorFlow optimizes them differently: their
results differ in the last bits, and those of a resumed run from those of an uninterrupted one. And
`keras.ops.shape(x)[0]` would be the rows of one replica as a Python number, which no replica can add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.keras_adapter import data_position, private_api
from tfdistkit.strategies.metrics.output_losses import BatchWeights
from tfdistkit.supported import numbers_of

_TAKES_BATCHES = numbers_of(keras.__version__) >= (3, 16)

Function = Callable[[Any], Any]


def make_function(original: Any, weights: BatchWeights, model: Any, step_function: Any) -> Function:
    """Makes a train or test function whose traces do not depend on which batch comes first.

    Args:
        original: Keras's `_make_function`.
        weights: The weights of the batches in the logs of the losses of outputs.
        model: The model.
        step_function: Its train or test step.
    """
    if not _TAKES_BATCHES or model.run_eagerly or model.steps_per_execution > 1:  # In several steps Keras does so.
        unchanged: Function = original(model, step_function)
        return unchanged
    function: Function = original(model, weights.around(step_function))

    def for_any_rows(iterator: Any) -> Any:
        with weights.for_any_rows():
            return function(iterator)

    of_dataset = for_dataset(for_any_rows)

    def on_iterator(iterator: Any) -> Any:
        # Without a strategy of ours Keras stays as it is, unless a backup promises the bits of an uninterrupted run.
        is_ours, is_tracking = private_api.is_ours(model.distribute_strategy), data_position.is_tracking()
        is_dataset = isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator))
        if not is_dataset or not (is_ours or is_tracking):
            return function(iterator)
        if is_ours:
            weights.begin(by_rows=not is_tracking)
        return of_dataset(iterator)

    return on_iterator


def for_dataset(function: Function) -> Function:
    """Returns a function of an iterator over a dataset, traced for the element spec of the dataset.

    Args:
        function: Keras's train or test function, which takes an iterable of batches, too.
    """
    is_traced = False

    @tf.autograph.experimental.do_not_convert
    def on_optional(optional: Any) -> Any:
        return function(iter([optional.get_value()]))

    traced = tf.function(on_optional, reduce_retracing=True)

    def on_iterator(iterator: Any) -> Any:
        nonlocal is_traced
        if not is_traced:  # Before a batch is taken: a step that cannot be traced must not lose it.
            traced.get_concrete_function(tf.OptionalSpec(iterator.element_spec))
            is_traced = True
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            raise StopIteration
        return traced(optional)

    return on_iterator
