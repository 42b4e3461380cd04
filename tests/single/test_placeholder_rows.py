"""The number of rows of a batch that is hidden while a step is traced, for every kind of tensor."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow


def _kinds() -> dict[str, Any]:
    import tensorflow as tf

    return {
        "dense": tf.constant([[1.0, 2.0]]),
        "strings": tf.constant(["one"]),
        "ragged": tf.ragged.constant([[1, 2, 3]]),
        "nested_ragged": tf.ragged.constant([[[1, 2], [3]]]),
        "uniform_ragged": tf.RaggedTensor.from_uniform_row_length(tf.constant([1.0, 2.0]), 2),
        "sparse": tf.SparseTensor([[0, 1]], [1.0], [1, 3]),
    }


@pytest.mark.parametrize("kind", ["dense", "strings", "ragged", "nested_ragged", "uniform_ragged", "sparse"])
def test_the_number_of_rows_is_hidden_and_nothing_else(kind: str) -> None:
    import tensorflow as tf

    from tfdistkit.strategies.sync.placeholder_rows import hide_rows

    value = _kinds()[kind]
    shapes = []

    @tf.function(input_signature=[])
    def step() -> Any:
        given = tf.SparseTensor(value.indices, value.values, [1, 3]) if kind == "sparse" else value
        hidden = hide_rows({"x": tf.nest.map_structure(tf.identity, given, expand_composites=True)}, rows=1)["x"]
        shapes.append(hidden.shape)
        return hidden

    returned = step()
    assert shapes[0].rank == value.shape.rank
    assert shapes[0][0] is None
    assert shapes[0][1:].as_list() == value.shape[1:].as_list()
    assert type(returned) is type(value) or kind in ("dense", "strings")
    as_list = {"sparse": lambda v: tf.sparse.to_dense(v).numpy().tolist()}.get(
        kind, lambda v: v.to_list() if isinstance(v, tf.RaggedTensor) else v.numpy().tolist()
    )
    assert as_list(returned) == as_list(value)
