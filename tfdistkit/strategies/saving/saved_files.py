"""Models that all ranks save to one file: each writes a file of its own beside it, and renames that.

A script says `model.save("model.keras")` once, and every rank runs it, at the same moment: two writers of one file
leave a damaged one. All ranks hold the same model, so whichever file remains is right, on a disk of each host as well.
"""

from __future__ import annotations

import os
from typing import Any

from tfdistkit.atomic_files import whole_file
from tfdistkit.collectives import registry
from tfdistkit.keras_adapter import private_api


def save_weights(original: Any, model: Any, filepath: Any, max_shard_size: Any = None, **kwargs: Any) -> Any:
    """Saves the weights of a model, as `save`; in several files as Keras does.

    Args:
        original: The function of Keras.
        model: As in `save`.
        filepath: As in `save`.
        max_shard_size: As in Keras.
        kwargs: As in Keras.
    """
    if max_shard_size is not None:
        return original(model, filepath, max_shard_size, **kwargs)
    return save(original, model, filepath, **kwargs)


def save(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Saves a model.

    Args:
        original: The function of Keras.
        model: The model.
        filepath: Where to; anything but a local path of one file is left to Keras.
        args: As in Keras.
        kwargs: As in Keras.
    """
    strategy = getattr(model, "distribute_strategy", None)  # Layers have none.
    is_of_job = private_api.is_ours(strategy) and registry.process_count(strategy) > 1
    if not (is_of_job and kwargs.get("zipped", True) and _is_local_file(filepath)):
        return original(model, filepath, *args, **kwargs)
    with whole_file(os.fspath(filepath)) as path:
        return original(model, path, *args, **kwargs)


def _is_local_file(path: Any) -> bool:
    if not isinstance(path, (str, os.PathLike)) or "://" in str(path) or os.path.isdir(path):
        return False
    return os.path.isdir(os.path.dirname(os.path.realpath(path)))
