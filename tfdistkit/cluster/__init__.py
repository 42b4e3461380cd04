"""Describes the job: its processes, their addresses, and the rank of this one. Loads no TensorFlow."""

from tfdistkit.cluster.addresses import host_key, join_address, split_address
from tfdistkit.cluster.detection import detect_cluster, is_chief, local_rank, rank, world_size
from tfdistkit.cluster.own_address import check_own_address
from tfdistkit.cluster.ports import free_ports, is_free
from tfdistkit.cluster.rendezvous.exchange import Rendezvous, exchange_facts
from tfdistkit.cluster.spec import ROLES, TRAINING_ROLES, ClusterSpec, TaskSpec
from tfdistkit.cluster.tf_config import from_tf_config, to_tf_config

__all__ = [
    "ROLES",
    "TRAINING_ROLES",
    "ClusterSpec",
    "Rendezvous",
    "TaskSpec",
    "check_own_address",
    "detect_cluster",
    "exchange_facts",
    "free_ports",
    "from_tf_config",
    "host_key",
    "is_chief",
    "is_free",
    "join_address",
    "local_rank",
    "rank",
    "split_address",
    "to_tf_config",
    "world_size",
]


def __dir__() -> list[str]:
    return sorted(__all__)
