"""Horovod's ranks find each other where nobody told them how: over Gloo, at the addresses of the cluster.

`horovodrun` and our launcher run a store in which Gloo's ranks meet, and tell each rank where it is. Under `srun`, or
with a TF_CONFIG, nobody does: then the ranks meet at rank 0's address first, as those of `multiworker`, and rank 0
keeps the store for all, until it ends.
"""

from __future__ import annotations

import socket

from tfdistkit import env
from tfdistkit.cluster.addresses import host_key, is_on_loopback, split_address
from tfdistkit.cluster.environments import horovod, mpi
from tfdistkit.cluster.own_address import check_own_address
from tfdistkit.cluster.rendezvous.exchange import exchange_facts
from tfdistkit.cluster.rendezvous.gloo_store import GlooStore
from tfdistkit.cluster.routes import interface_of, own_ip_towards
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.collectives.horovod_transport import hvd
from tfdistkit.strategies.consistency.versions import facts

# By any of these Horovod's MPI finds its world: mpirun's, and those of `srun --mpi=pmix` and `--mpi=pmi2`.
_MPI_WORLD = (mpi.OPEN_MPI.rank, "PMIX_RANK", "PMI_RANK")

# As for `multiworker`: a scheduler may start the hosts of a job one after the other.
_RENDEZVOUS_S = 300.0
# Rank 0's alone: where its store listens, and what opens it.
_STORE_PORT_FACT = "gloo_store_port"
_STORE_SECRET_FACT = "gloo_store_secret"

# Rank 0's, for Horovod may be initialised again.
_stores: list[GlooStore] = []


def introduce_ranks(cluster: ClusterSpec) -> None:
    """Lets the ranks find each other, and tells Horovod in its variables, unless a launcher did, or MPI does.

    To be called before Horovod is initialised.

    Args:
        cluster: All ranks with their addresses; without them, Horovod's own launchers are needed.

    Raises:
        RendezvousError: if a rank does not come.
        ClusterConfigError: if versions or the addresses differ, or this rank's own is not its own.
    """
    if not needs_introduction(cluster):
        return
    check_own_address(cluster)
    told = facts()
    if cluster.is_chief:
        _stores.append(GlooStore(cluster.world_size, host=_store_host(cluster)))
        told[_STORE_PORT_FACT] = _stores[-1].address[1]
        told[_STORE_SECRET_FACT] = _stores[-1].secret
    facts_of_first = exchange_facts(cluster, told, _RENDEZVOUS_S).facts[0]
    store = int(facts_of_first[_STORE_PORT_FACT]), str(facts_of_first[_STORE_SECRET_FACT])
    for name, value in _variables(cluster, *store).items():
        env.put(name, value)


def needs_introduction(cluster: ClusterSpec) -> bool:
    """Whether the ranks have to find each other by themselves, and can.

    Args:
        cluster: The cluster as far as somebody told.
    """
    if hvd.is_initialized() or cluster.world_size == 1 or not cluster.has_addresses:
        return False
    if env.text(horovod.NAMES.rank) is not None or env.text(horovod.STORE_HOST) is not None:
        return False  # a launcher of Horovod's did
    if (env.text(horovod.CONTROLLER) or "").lower() == "mpi":
        return False
    return not (hvd.mpi_built() and any(env.text(name) is not None for name in _MPI_WORLD))


def _variables(cluster: ClusterSpec, store_port: int, store_secret: str) -> dict[str, str]:
    """What Horovod's launcher would tell this rank."""
    variables = {
        **horovod.gloo_variables(cluster),
        **horovod.store_variables(_ip_of(split_address(cluster.workers[0])[0]), store_port, store_secret),
    }
    interface = env.text(horovod.GLOO_INTERFACE) or _interface(cluster)
    return variables if interface is None else {**variables, horovod.GLOO_INTERFACE: interface}


def _store_host(cluster: ClusterSpec) -> str:
    """Loopback where all are there; else all interfaces, for by which address the others come is not known here."""
    if not is_on_loopback(cluster.workers):
        return "0.0.0.0"
    ip = _ip_of(split_address(cluster.workers[0])[0])
    return ip if "." in ip else "127.0.0.1"


def _interface(cluster: ClusterSpec) -> str | None:
    """The one that leads to the others; Gloo's own choice goes by this machine's name, which may stand for itself."""
    hosts = [host_key(address) for address in cluster.workers]
    own = hosts[cluster.rank]
    others = [rank for rank, host in enumerate(hosts) if host != own] or [cluster.rank]
    ip = own_ip_towards(split_address(cluster.workers[others[0]])[0])
    return None if ip is None else interface_of(ip)


def _ip_of(host: str) -> str:
    """Horovod's own client looks names up as well, but tells nobody when it cannot."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host
