"""Padding: copies of a row with sample weight 0 that make all shards equally large.

The weight is -0.0, which counts as 0 in every sum and product, so padding differs from rows to which the user gave
weight 0. `fit` removes the padding: Keras divides a loss by all rows, including rows of weight 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.errors import OptionError, explain

_SIGN_ALONE = np.int32(-(2**31))  # -0.0 as float32


def require_weights_fit(element_spec: Any) -> None:
    """Raises an error if elements cannot have a sample weight.

    Args:
        element_spec: The `element_spec` of their dataset.

    Raises:
        OptionError: if they are no (x, y) or (x, y, sample_weight), or have sparse tensors.
    """
    sparse = any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(element_spec))
    if sparse or not isinstance(element_spec, tuple) or len(element_spec) not in (2, 3):
        raise OptionError(
            explain(
                'Elements must be (x, y) or (x, y, sample_weight), without sparse tensors, with even_steps="pad".',
                received=f"elements like {element_spec}",
                do='Pass even_steps="drop", or map the elements to (x, y) first.',
            )
        )


def require_weights_kept(element_spec: Any) -> None:
    """Raises an error if padded elements have lost their sample weight.

    Args:
        element_spec: The `element_spec` of their dataset.

    Raises:
        OptionError: if they are no (x, y, sample_weight).
    """
    if not isinstance(element_spec, tuple) or len(element_spec) != 3:
        raise OptionError(
            explain(
                'Padded elements (even_steps="pad") must stay (x, y, sample_weight): the weights mark the padding.',
                received=f"elements like {element_spec}",
                do="Return the third value from every `map` after `shard`; or leave `even_steps` out: `fit` needs no "
                "padding.",
            )
        )


def require_weights_of_rows(element_spec: Any) -> None:
    """Raises an error if padded batches have one weight for all of their rows.

    Args:
        element_spec: The `element_spec` of their dataset, of (x, y, sample_weight).

    Raises:
        OptionError: if a sample weight is a scalar: the elements were batches before they were padded.
    """
    if any(getattr(spec, "shape", None) == () for spec in tf.nest.flatten(element_spec[2])):
        raise OptionError(
            explain(
                'Padded elements (even_steps="pad") must be batched after `shard`: each row has a weight of its own.',
                received="batches with one weight for all of their rows, of a dataset that was batched before `shard`",
                do='Write `shard(dataset, even_steps="pad").batch(...)`; or leave `even_steps` out: `fit` needs no '
                "padding.",
            )
        )


def with_weight(element: tuple, padded: Any, rows: Any = None) -> tuple:
    """Gives an element or a batch the user's sample weight, 1 by default; padding gets -0.0.

    Args:
        element: (x, y) or (x, y, sample_weight).
        padded: Whether it is padding: a boolean scalar; for a batch, a vector.
        rows: For a batch, its rows; None for an element.

    Returns:
        (x, y, sample_weight).
    """
    given = element[2] if len(element) == 3 else tf.ones([] if rows is None else [rows])

    def weight(value: Any) -> Any:
        value = value if value.dtype.is_floating else tf.cast(value, tf.float32)
        # -0.0 marks padding, so a -0.0 of the user becomes 0.0.
        value = tf.where(value == 0, tf.zeros_like(value), value)
        shape = tf.concat([tf.shape(padded), tf.ones([tf.rank(value) - tf.rank(padded)], tf.int32)], 0)
        return tf.where(tf.reshape(padded, shape), tf.constant(-0.0, value.dtype), value)

    return (element[0], element[1], tf.nest.map_structure(weight, given))


def is_padding(weights: Any) -> tf.Tensor:
    """Returns which rows of a batch are padding.

    Args:
        weights: The sample weights of the batch.

    Returns:
        A boolean vector.
    """
    weight = tf.cast(tf.nest.flatten(weights)[0], tf.float32)
    signs = tf.bitcast(tf.reshape(weight, [tf.shape(weight)[0], -1]), tf.int32)
    return tf.reduce_all(signs == _SIGN_ALONE, axis=1)


def without_padding(x: Any, y: Any, weights: Any) -> tuple:
    """Removes the padding from a batch.

    Args:
        x: Its inputs.
        y: Its targets.
        weights: Its sample weights.

    Returns:
        The batch without these rows; it may be empty.
    """
    kept = tf.where(tf.logical_not(is_padding(weights)))[:, 0]

    def rows(value: Any) -> Any:
        has_rows = isinstance(value, tf.RaggedTensor) or value.shape.rank != 0
        return tf.gather(value, kept) if has_rows else value

    return tf.nest.map_structure(rows, (x, y, weights))
