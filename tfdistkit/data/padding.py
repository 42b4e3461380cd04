"""Rows that only fill a part up: a copy of some row, with a sample weight of 0.

The weight is -0.0, which every sum and product takes for 0, so that padding can be told from rows to which the user
gave no weight. `fit` takes such rows out again: Keras divides a loss by all rows, also by those that weigh nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.errors import OptionError, explain

_SIGN_ALONE = np.int32(-(2**31))  # -0.0 as float32


def require_weights_fit(element_spec: Any) -> None:
    """Checks that elements can carry a sample weight.

    Args:
        element_spec: The `element_spec` of their dataset.

    Raises:
        OptionError: if they cannot.
    """
    sparse = any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(element_spec))
    if sparse or not isinstance(element_spec, tuple) or len(element_spec) not in (2, 3):
        raise OptionError(
            explain(
                'Elements cannot be padded with `even_steps="pad"`: there is no place for a sample weight.',
                received=f"elements like {element_spec}",
                expected="(x, y) or (x, y, sample_weight), without sparse tensors",
                do='Take even_steps="drop", or map the elements to (x, y) first.',
            )
        )


def require_weights_kept(element_spec: Any) -> None:
    """Checks that padded elements still carry a sample weight.

    Args:
        element_spec: The `element_spec` of their dataset.

    Raises:
        OptionError: if they do not.
    """
    if not isinstance(element_spec, tuple) or len(element_spec) != 3:
        raise OptionError(
            explain(
                'The weights that tell padding from data (`even_steps="pad"`) are gone.',
                received=f"elements like {element_spec}",
                expected="(x, y, sample_weight)",
                do="Let every `map` after `shard` hand the third value on; or leave `even_steps` out: `fit` needs no "
                "padding.",
            )
        )


def weighted(element: tuple, padded: Any, rows: Any = None) -> tuple:
    """Gives an element, or a batch, the weight 1, or that of the user; padding weighs -0.0.

    Args:
        element: (x, y) or (x, y, sample_weight).
        padded: Whether it is padding, a boolean scalar; for a batch, a vector.
        rows: For a batch, its rows; None for an element.

    Returns:
        (x, y, sample_weight).
    """
    given = element[2] if len(element) == 3 else tf.ones([] if rows is None else [rows])

    def weight(value: Any) -> Any:
        value = value if value.dtype.is_floating else tf.cast(value, tf.float32)
        # A zero of the user's may have a sign; that of padding alone shall.
        value = tf.where(value == 0, tf.zeros_like(value), value)
        shape = tf.concat([tf.shape(padded), tf.ones([tf.rank(value) - tf.rank(padded)], tf.int32)], 0)
        return tf.where(tf.reshape(padded, shape), tf.constant(-0.0, value.dtype), value)

    return (element[0], element[1], tf.nest.map_structure(weight, given))


def is_padding(weights: Any) -> tf.Tensor:
    """Tells which rows of a batch are padding.

    Args:
        weights: The sample weights of the batch.

    Returns:
        A boolean vector.
    """
    weight = tf.cast(tf.nest.flatten(weights)[0], tf.float32)
    signs = tf.bitcast(tf.reshape(weight, [tf.shape(weight)[0], -1]), tf.int32)
    return tf.reduce_all(signs == _SIGN_ALONE, axis=1)


def without_padding(x: Any, y: Any, weights: Any) -> tuple:
    """Takes the padding out of a batch.

    Args:
        x: Its inputs.
        y: Its targets.
        weights: Its sample weights.

    Returns:
        The batch without these rows; perhaps none are left.
    """
    kept = tf.where(tf.logical_not(is_padding(weights)))[:, 0]

    def rows(value: Any) -> Any:
        has_rows = isinstance(value, tf.RaggedTensor) or value.shape.rank != 0
        return tf.gather(value, kept) if has_rows else value

    return tf.nest.map_structure(rows, (x, y, weights))
