"""Keras layers for embedding tables larger than one parameter server."""

from tfdistkit.layers.sharded_embedding import ShardedEmbedding

__all__ = ["ShardedEmbedding"]


def __dir__() -> list[str]:
    return sorted(__all__)
