"""Buckets of gradients: the last gradients first, a small bucket to begin with, and nothing left out."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.communication import Wire
from tfdistkit.communication.buckets import FUSION_BYTES, buckets

pytestmark = pytest.mark.tensorflow

MB = 1 << 20


def in_graph(sizes: list[int], *limits: int | None) -> list[list[int]]:
    """Returns the buckets of float32 tensors of these sizes in bytes, in a graph."""
    with tf.Graph().as_default():
        tensors = [tf.compat.v1.placeholder(tf.float32, [size // 4]) for size in sizes]
        return buckets(tensors, *limits)


@pytest.mark.parametrize(
    "sizes, fusion_bytes, expected",
    [
        ([], FUSION_BYTES, []),
        ([MB // 4] * 3, FUSION_BYTES, [[0, 1, 2]]),
        ([MB] * 4, None, [[0, 1, 2, 3]]),
        # The first bucket is small, and a tensor that is larger than a bucket has one of its own.
        ([MB] * 4, FUSION_BYTES, [[3], [0, 1, 2]]),
        ([64 * MB, MB, 4, 16 * MB, 4], FUSION_BYTES, [[4], [1, 2, 3], [0]]),
        ([MB] * 4, 2 * MB, [[3], [1, 2], [0]]),
        ([8] * 3, 1, [[2], [1], [0]]),
    ],
)
def test_buckets(sizes: list[int], fusion_bytes: int | None, expected: list[list[int]]) -> None:
    assert in_graph(sizes, fusion_bytes) == expected


def test_gradients_of_one_operation_are_one_bucket_without_a_small_first_one() -> None:
    """As under Horovod, where each operation takes a cycle of its thread."""
    assert in_graph([MB] * 4, FUSION_BYTES, FUSION_BYTES) == [[0, 1, 2, 3]]
    assert in_graph([64 * MB, MB, 4], FUSION_BYTES, FUSION_BYTES) == [[1, 2], [0]]


def test_eager_tensors_are_one_bucket_as_nothing_is_computed_meanwhile() -> None:
    assert buckets([tf.zeros([MB])] * 3, FUSION_BYTES) == [[0, 1, 2]]


def test_tensors_of_unknown_size_and_slices_join_a_bucket() -> None:
    with tf.Graph().as_default():
        unknown = tf.compat.v1.placeholder(tf.float32, [None, 4])
        rows = tf.IndexedSlices(tf.compat.v1.placeholder(tf.float32, [None, 4]), tf.constant([0]))
        tensors = [rows, unknown, tf.compat.v1.placeholder(tf.float32, [MB // 4])]
        assert buckets(tensors, FUSION_BYTES) == [[0, 1, 2]]


def test_a_wire_returns_the_sums_in_the_order_of_the_tensors() -> None:
    sent: list[int] = []

    def double(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        sent.append(len(tensors))
        return [2 * tensor for tensor in tensors]

    @tf.function
    def step() -> list[tf.Tensor]:
        wire = Wire(2, 0, double)
        wire.fusion_bytes = 8
        return wire.sum([tf.fill([2], float(i)) for i in range(3)])

    np.testing.assert_array_equal([total.numpy() for total in step()], [[0, 0], [2, 2], [4, 4]])
    assert sent == [1, 1, 1]
