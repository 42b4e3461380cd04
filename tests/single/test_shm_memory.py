"""Operations over shared memory keep nothing once they have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from shm_ranks import engines

pytestmark = pytest.mark.tensorflow

STEPS = 4000


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_steps_of_a_graph_keep_nothing() -> None:
    """TensorFlow keeps a tensor of each Python number that it converts: 750 bytes for each number of an operation."""
    import tensorflow as tf

    from tfdistkit.collectives.shm.transport import SharedMemoryTransport

    with engines(1) as [engine]:
        transport = SharedMemoryTransport(engine, 60.0)

        @tf.function(autograph=False)
        def step(value: tf.Tensor) -> tf.Tensor:
            return transport.all_reduce([value], tf.distribute.ReduceOp.SUM)[0]

        value, sizes = tf.ones([40]), []
        for _ in range(3):
            for _ in range(STEPS):
                step(value)
            sizes.append(_resident_bytes())
    assert sizes[2] - sizes[1] < 200 * STEPS
