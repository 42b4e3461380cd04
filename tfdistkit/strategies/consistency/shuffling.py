"""Gives all ranks one shuffle order."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency.data_comparison import agree_on_data, is_compared, is_divided
from tfdistkit.strategies.consistency.first_elements import noted
from tfdistkit.strategies.consistency.row_exchange import table

# The number of shuffle orders from which a job without a seed of the user draws one.
_ORDERS = 1 << 12


def set_seed_of_job(seed: int) -> None:
    """Makes shuffles without a seed of the user equal on all ranks; called if no global seed is set.

    A shuffle with a seed, such as `shuffle(100, seed=3)`, keeps the order that it has in one process: the global seed
    becomes TensorFlow's default, and the job's seed chooses which seeds are drawn from it next.

    Args:
        seed: The seed of this job, the same on all ranks.
    """
    assumed, _ = tf.compat.v1.random.get_seed(1)
    tf.random.set_seed(assumed)
    for _ in range(seed % _ORDERS):
        tf.compat.v1.random.get_seed(None)


class AgreedShuffling:
    """A mixin that gives a strategy of several processes one shuffle order."""

    # Whether the ranks compare their data (`data_comparison`).
    check_data = True

    def agreed_data(self, dataset: tf.data.Dataset | None, call: str, facts: dict[str, Any]) -> Any:
        """Returns a dataset with the same order on all ranks; all ranks call it.

        Args:
            dataset: The whole data, the same on all ranks; None to compare only `facts`.
            call: The user's call, for the error.
            facts: Further facts that must be equal.

        Raises:
            UnsupportedError: on all ranks, if their data differs.
        """
        if not is_compared(self):
            return dataset
        agreed, graph = agree_on_data(self, dataset, call, False, facts)
        return agreed if graph is None else noted(agreed, graph)

    def agreed_batches(self, dataset: Any, call: str) -> Any:
        """Returns a dataset with the same order on all ranks, for a loop of the user; all ranks call it.

        Args:
            dataset: What the user distributes; only a `tf.data.Dataset` is compared.
            call: The user's call, for the error.

        Raises:
            UnsupportedError: on all ranks, if their data differs.
        """
        if not isinstance(dataset, tf.data.Dataset) or not tf.executing_eagerly() or not is_compared(self):
            return dataset
        return agree_on_data(self, dataset, call, is_divided(dataset), {})[0]

    @contextlib.contextmanager
    def agreed_shuffling(self) -> Iterator[None]:
        """Makes every shuffle in its body the same on all ranks, whatever seeds the user set.

        Each rank keeps its own part of a shuffled order, so different orders lose data and repeat data. Equal seeds,
        as after `keras.utils.set_random_seed(7)` on each rank, are kept.
        """
        seed = private_api.global_seed()
        version, state, gauss = random.getstate()
        everyone = table(self, np.array([-1 if seed is None else seed, *state], np.int64))
        if (everyone[:, 1:] != everyone[0, 1:]).any():  # Keras shuffles a PyDataset with Python's generator.
            random.setstate((version, tuple(everyone[0, 1:].tolist()), gauss))
        if (everyone[:, 0] == everyone[0, 0]).all() and seed is not None:
            yield
            return
        tf.random.set_seed(max(int(everyone[0, 0]), 0))
        try:
            yield
        finally:
            tf.random.set_seed(seed)
