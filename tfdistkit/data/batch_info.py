"""What tfdistkit knows of distributed batches, and TensorFlow and Keras do not tell: one object for each owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "tfdistkit_batch_info"


@dataclass
class BatchInfo:
    """What belongs to a distributed dataset, to an iterator over it, or to an epoch iterator of Keras.

    Args:
        element_spec: The structure of the global batches of a dataset.
        is_own_part: Whether a dataset is the part of the data of this worker alone, whose number of steps is unknown.
        ends_every_epoch: Whether each epoch over a dataset lasts as long as its data, which may differ.
        is_uncounted: Whether an iterator may be asked for a step where there is no more data.
        position: The position of an epoch iterator in the data, which a backup follows (`DataPosition`).
        validated: The same of the `fit` for whose evaluations an epoch iterator is (`DataPosition`).
        comparison: The comparison of the batches of an epoch iterator between ranks (`EpochComparison`).
        generator: The reader of a Python generator that an epoch iterator reads (`GeneratorReader`).
    """

    element_spec: Any = None
    is_own_part: bool = False
    ends_every_epoch: bool = False
    is_uncounted: bool = False
    position: Any = None
    validated: Any = None
    comparison: Any = None
    generator: Any = None


def add_info(owner: Any, **fields: Any) -> None:
    """Writes fields of the information on a dataset or an iterator.

    Args:
        owner: The dataset or iterator.
        **fields: Fields of `BatchInfo`.
    """
    info = getattr(owner, _ATTRIBUTE, None) or BatchInfo()
    for name, value in fields.items():
        setattr(info, name, value)
    setattr(owner, _ATTRIBUTE, info)


def info_of(owner: Any) -> BatchInfo:
    """Returns the information on a dataset or an iterator; the defaults where nothing was written."""
    return getattr(owner, _ATTRIBUTE, None) or BatchInfo()
