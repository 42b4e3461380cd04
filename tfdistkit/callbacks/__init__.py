"""Keras callbacks that know who the chief is. Give the same list of callbacks to `fit` on every rank."""

from tfdistkit.callbacks.checkpoint import ChiefCheckpoint
from tfdistkit.callbacks.chief_only import ChiefOnly

__all__ = ["ChiefCheckpoint", "ChiefOnly"]
