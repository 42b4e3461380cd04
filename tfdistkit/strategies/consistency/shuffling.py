"""One order of the data for all ranks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.errors import OptionError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency.data_comparison import agree_on_data, is_compared
from tfdistkit.strategies.consistency.first_elements import noted
from tfdistkit.strategies.consistency.row_exchange import table


class AgreedShuffling:
    """Goes in front of a strategy of several processes."""

    # Whether the ranks compare their data (`data_comparison`).
    check_data = True

    def agreed_data(self, dataset: tf.data.Dataset | None, call: str, facts: dict[str, Any]) -> Any:
        """Returns a dataset that all ranks read in one order; all ranks call it.

        Args:
            dataset: The whole data, the same on all ranks; None where only `facts` are compared.
            call: What the user called, for the error.
            facts: What else has to be equal.

        Raises:
            UnsupportedError: on all ranks, if they bring different data.
        """
        if not is_compared(self):
            return dataset
        agreed, graph = agree_on_data(self, dataset, call, False, facts)
        return agreed if graph is None else noted(agreed, graph)

    @contextlib.contextmanager
    def agreed_shuffling(self) -> Iterator[None]:
        """Within it, whatever shuffles does so alike on all ranks, whatever seeds the user gave them.

        Each rank keeps its own part of a shuffled order, so different orders lose data and repeat data.
        Ranks that agree already, as after `keras.utils.set_random_seed(7)` on each, are left as they are.
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


def require_check_data(check_data: object) -> None:
    """Checks the option `check_data`.

    Raises:
        OptionError: if it is not True or False.
    """
    if not isinstance(check_data, bool):
        raise OptionError(
            explain("`check_data` must be True or False.", received=f"check_data={check_data!r}", expected="a bool")
        )
