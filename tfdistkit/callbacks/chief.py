"""Decides which process writes files."""

from __future__ import annotations

import keras

from tfdistkit.cluster.detection import is_chief


def writes_files(model: keras.Model | None) -> bool:
    """Returns whether this process writes the files of the job that trains `model`.

    Args:
        model: The model of a callback. Its tf.distribute strategy knows the chief; without a strategy of several
            replicas, the cluster in the environment does.

    Returns:
        True in one process of the job.
    """
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        return bool(strategy.extended.should_checkpoint)
    return is_chief()
