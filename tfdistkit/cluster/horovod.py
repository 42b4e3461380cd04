"""Horovod's variables: what `horovodrun`, and our launcher for Horovod, tell each process.

https://horovod.readthedocs.io: `HOROVOD_RANK` and so on are set by the launcher for Gloo. Under MPI they are not set,
and the rank is MPI's.
"""

from __future__ import annotations

from tfdistkit.cluster.counts import CountVariables, read_counts
from tfdistkit.cluster.spec import ClusterSpec

NAMES = CountVariables(
    source="Horovod's variables",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
)
# What is looked at.
VARIABLES = (NAMES.rank, NAMES.size, NAMES.local_rank, NAMES.local_size)


def read_horovod() -> ClusterSpec | None:
    """Returns the cluster that Horovod's variables describe, or None when they are not set.

    Raises:
        ClusterConfigError: if they contradict each other.
    """
    return read_counts(NAMES)
