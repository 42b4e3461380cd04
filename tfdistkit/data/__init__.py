"""How data is split over the workers: each element once, nothing lost, nothing hanging."""

from tfdistkit.data.arrays import from_arrays
from tfdistkit.data.datasets_of_tfds import from_tfds
from tfdistkit.data.files import from_files
from tfdistkit.data.marks import same_for_all_rows
from tfdistkit.data.places import per_replica_batch_size
from tfdistkit.data.seen import Coverage, coverage
from tfdistkit.data.sharding import shard

__all__ = [
    "Coverage",
    "coverage",
    "from_arrays",
    "from_files",
    "from_tfds",
    "per_replica_batch_size",
    "same_for_all_rows",
    "shard",
]


def __dir__() -> list[str]:
    return sorted(__all__)
