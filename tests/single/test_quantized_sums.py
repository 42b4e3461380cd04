"""Sums of quantized vectors, between replicas that are threads here: nothing is lost, and what is kept stays small."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import tfdistkit

pytestmark = pytest.mark.tensorflow

RANKS = 2


def summed(quantizer: Any, vectors: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the sum, the same for all, and what each replica keeps."""
    import tensorflow as tf

    from tfdistkit.communication import Wire
    from tfdistkit.communication.compression.scatter_gather import sum_quantized

    barrier, sent, results = threading.Barrier(RANKS, timeout=60.0), [None] * RANKS, [None] * RANKS

    class ThreadWire(Wire):
        def _exchanged(self, tensor: Any) -> list[Any]:
            sent[self.replica_id] = tensor
            barrier.wait()
            everyone = list(sent)
            barrier.wait()
            return everyone

        def gather(self, tensor: Any) -> Any:
            return tf.stack(self._exchanged(tensor))

        def exchange(self, rows: Any) -> Any:
            return tf.stack([one[self.replica_id] for one in self._exchanged(rows)])

    def run(rank: int) -> None:
        wire = ThreadWire(RANKS, rank, lambda tensors: tensors)
        results[rank] = [one.numpy() for one in sum_quantized(tf.constant(vectors[rank]), quantizer, wire)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: list[Any] = results
    for other in found[1:]:
        np.testing.assert_array_equal(other[0], found[0][0])
    return found[0][0], [one[1] for one in found]


def drawn(seed: int, size: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(size=size).astype("float32") for _ in range(RANKS)]


# The last block has 10 numbers, 1, or is full.
@pytest.mark.parametrize("size", (138, 65, 256))
@pytest.mark.parametrize("name", ("Sign", "ByteGrad", "Int8"))
def test_a_sum_and_what_is_kept_of_it(name: str, size: int) -> None:
    c = tfdistkit.compression
    quantizer = {"Sign": c.Sign(1, block=64), "ByteGrad": c.ByteGrad(64), "Int8": c.Int8(64)}[name]
    vectors = drawn(1, size)
    total, rests = summed(quantizer, vectors)
    np.testing.assert_allclose(total + sum(rests), sum(vectors), atol=1e-5)
    # Also in the block that is not full: its size is that of its numbers.
    assert np.abs(total).max() < 2.5 * np.abs(sum(vectors)).max()
    assert np.abs(total[-1]) > 0.01


def test_what_is_kept_stays_small() -> None:
    quantizer = tfdistkit.compression.Sign(1, block=64)
    rests: list[np.ndarray] = [np.zeros(256, "float32")] * RANKS
    sizes = []
    for step in range(60):
        _, rests = summed(quantizer, [one + rest for one, rest in zip(drawn(step, 256), rests)])
        sizes.append(float(np.mean(np.square(rests))))
    # 1.3 if a replica also kept what its own numbers lose on a way that they do not go.
    assert 0.6 < np.mean(sizes[10:]) < 1.0
