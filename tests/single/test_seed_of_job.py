"""Without a global seed of the user, a job chooses one: what has a seed of its own shuffles as in one process."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency.shuffling import set_seed_of_job

pytestmark = pytest.mark.tensorflow


def order(seed: int | None = None) -> list[int]:
    return [int(i) for i in tf.data.Dataset.range(50).shuffle(50, seed=seed)]


def order_in_job(job: int, seed: int | None = None) -> list[int]:
    before = private_api.global_seed()
    tf.random.set_seed(None)
    try:
        set_seed_of_job(job)
        return order(seed)
    finally:
        tf.random.set_seed(before)


def test_a_seed_of_the_user_gives_the_order_of_one_process() -> None:
    before = private_api.global_seed()
    tf.random.set_seed(None)
    try:
        alone = order(3)
    finally:
        tf.random.set_seed(before)
    assert order_in_job(1, 3) == order_in_job(7, 3) == alone


def test_without_one_each_job_has_its_order() -> None:
    assert order_in_job(1) == order_in_job(1) != order_in_job(2)
