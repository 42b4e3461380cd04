"""Horovod's variables: what `horovodrun`, and our launcher for Horovod, tell each process.

https://horovod.readthedocs.io: `HOROVOD_RANK` and so on are set by the launcher for Gloo. Under MPI they are not set,
and the rank is MPI's.
"""

from __future__ import annotations

from tfdistkit.cluster.addresses import host_key, split_address
from tfdistkit.cluster.environments.rank_size import CountVariables, read_counts
from tfdistkit.cluster.spec import ClusterSpec

NAMES = CountVariables(
    source="Horovod's variables",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
)
# Which library carries Horovod's decisions, and which one its data.
CONTROLLER = "HOROVOD_CONTROLLER"
CPU_OPERATIONS = "HOROVOD_CPU_OPERATIONS"
# The network interface of Gloo.
GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
# Where the store is in which Gloo's ranks meet.
STORE_HOST = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"

# What is looked at.
VARIABLES = (NAMES.rank, NAMES.size, NAMES.local_rank, NAMES.local_size)


def read_horovod() -> ClusterSpec | None:
    """Returns the cluster that Horovod's variables describe, or None when they are not set.

    Raises:
        ClusterConfigError: if they contradict each other.
    """
    return read_counts(NAMES)


def store_variables(host: str, port: int, secret: str) -> dict[str, str]:
    """Returns what tells a rank of Gloo where the store is, see `gloo_store`.

    Horovod's client asks for `http://<host>:<port>/<scope>/<key>`, and has no option for credentials. What it is told
    as the host goes into that as it is, so port and secret stand in it, too.

    Args:
        host: The store's address, as the ranks reach it.
        port: Its port.
        secret: What the paths of its URLs begin with.
    """
    return {STORE_HOST: f"{host}:{port}/{secret}", STORE_PORT: str(port)}


def gloo_variables(cluster: ClusterSpec) -> dict[str, str]:
    """Returns what tells a rank of Gloo its place; where the store is, is told apart.

    Args:
        cluster: All ranks with their addresses.
    """
    hosts = [host_key(address) for address in cluster.workers]
    own = hosts[cluster.rank]
    # The hosts with a rank of the same local rank: Horovod reduces across them where it reduces within hosts first.
    across = [host for host in dict.fromkeys(hosts) if hosts.count(host) > cluster.local_rank]
    return {
        NAMES.rank: str(cluster.rank),
        NAMES.size: str(cluster.world_size),
        NAMES.local_rank: str(cluster.local_rank),
        NAMES.local_size: str(cluster.local_world_size),
        "HOROVOD_CROSS_RANK": str(across.index(own)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        # One name for a host, also where its ranks know it by several.
        "HOROVOD_HOSTNAME": split_address(cluster.workers[hosts.index(own)])[0],
        CONTROLLER: "gloo",
        CPU_OPERATIONS: "gloo",
    }
