"""How data is split over the workers: each element once, nothing lost, nothing hanging."""

from tfdistkit.data.dataset_metadata import same_for_all_rows
from tfdistkit.data.element_counts import Coverage, coverage
from tfdistkit.data.loading.arrays import from_arrays
from tfdistkit.data.loading.datasets_of_tfds import from_tfds
from tfdistkit.data.loading.files import from_files
from tfdistkit.data.shard_spec import per_replica_batch_size
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
