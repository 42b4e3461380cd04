"""The sums of three Horovod ranks, in which the order of additions shows."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.horovod,
    pytest.mark.parametrize(("engine", "world_size"), [("horovod", 3)]),
]

# Two operations that are ready at the same time or not, as a random delay decides. Where Horovod fuses them, the sums
# of three numbers are added in another order.
AT_RANDOM_TIMES = """
    import random
    import numpy as np, tensorflow as tf
    from tfdistkit.collectives import horovod_transport

    numbers = np.random.default_rng(rank)
    first, second = ([tf.constant(numbers.normal(size=n), tf.float32) for n in sizes]
                     for sizes in ((11000, 70001), (50003, 13, 30001)))
    matrix = tf.random.stateless_normal([200, 200], [1, 2]) / 20

    def delayed(tensor, rounds):
        after = tf.while_loop(lambda i, m: i < rounds, lambda i, m: (i + 1, m @ matrix), [0, matrix])[1]
        return tensor + tf.cast(tf.reduce_sum(after) > 1e30, tf.float32)

    @tf.function
    def step(rounds, others):
        return [one for parts, number in ((first, rounds), (second, others))
                for one in horovod_transport.all_reduce([delayed(parts[0], number), *parts[1:]],
                                                        tf.distribute.ReduceOp.SUM)]

    draws, found = random.Random(3), set()
    for _ in range(100):
        delays = draws.choice([(0, 0), (60, 0), (0, 60), (2, 2)])
        found.add(b"".join(sums.numpy().tobytes() for sums in step(*map(tf.constant, delays))))
    print(len(found))
"""


@pytest.mark.part(AT_RANDOM_TIMES)
def test_sums_of_three_ranks_keep_their_bits_at_any_speed(printed: list[str]) -> None:
    assert [text.split() for text in printed] == [["1"]] * 3
