"""Reads and writes Horovod's variables, which `horovodrun` and our launcher set for each process.

With Gloo, the launcher sets `HOROVOD_RANK` and so on (https://horovod.readthedocs.io). With MPI they are not set, and
the rank is MPI's.
"""

from __future__ import annotations

from tfdistkit.cluster.addresses import host_key, split_address
from tfdistkit.cluster.environments.rank_size import RankVariables, read_rank_size
from tfdistkit.cluster.spec import ClusterSpec

NAMES = RankVariables(
    source="Horovod's variables",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
)
# The library for Horovod's control messages, and the one for its data.
CONTROLLER = "HOROVOD_CONTROLLER"
CPU_OPERATIONS = "HOROVOD_CPU_OPERATIONS"
# The network interface of Gloo.
GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
# After how many seconds Horovod's coordinator tells which ranks have not called a collective of the others.
STALL_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"
# The address of the store for the rendezvous of Gloo's ranks.
STORE_HOST = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"

# The variables that are read.
VARIABLES = (NAMES.rank, NAMES.size, NAMES.local_rank, NAMES.local_size)


def read_horovod() -> ClusterSpec | None:
    """Returns the cluster of Horovod's variables, or None if they are not set.

    Raises:
        ClusterConfigError: if they contradict each other.
    """
    return read_rank_size(NAMES)


def store_variables(host: str, port: int, secret: str) -> dict[str, str]:
    """Returns the variables with the address of the store for a rank of Gloo, see `gloo_store`.

    Horovod's client requests `http://<host>:<port>/<scope>/<key>`, and has no option for credentials. It copies the
    host into the URL unchanged, so the variable for the host contains port and secret too.

    Args:
        host: The address of the store, reachable for the ranks.
        port: The port of the store.
        secret: The prefix of all paths in the store.
    """
    return {STORE_HOST: f"{host}:{port}/{secret}", STORE_PORT: str(port)}


def gloo_variables(cluster: ClusterSpec) -> dict[str, str]:
    """Returns the variables with rank and size for a rank of Gloo, without the address of the store.

    Args:
        cluster: All ranks with their addresses.
    """
    hosts = [host_key(address) for address in cluster.workers]
    own = hosts[cluster.rank]
    # The hosts with the same local rank: a hierarchical all-reduce of Horovod reduces across them.
    across = [host for host in dict.fromkeys(hosts) if hosts.count(host) > cluster.local_rank]
    return {
        NAMES.rank: str(cluster.rank),
        NAMES.size: str(cluster.world_size),
        NAMES.local_rank: str(cluster.local_rank),
        NAMES.local_size: str(cluster.local_world_size),
        "HOROVOD_CROSS_RANK": str(across.index(own)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        # One name for each host, even if its ranks use different ones.
        "HOROVOD_HOSTNAME": split_address(cluster.workers[hosts.index(own)])[0],
        CONTROLLER: "gloo",
        CPU_OPERATIONS: "gloo",
    }
