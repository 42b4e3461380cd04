"""How data is split over the workers."""

from tfdistkit.data.sharding import shard

__all__ = ["shard"]
