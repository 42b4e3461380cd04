"""Rendezvous of Horovod's ranks over Gloo where no launcher of Horovod's started them, at the cluster's addresses.

`horovodrun` and our launcher run a store for Gloo's rendezvous, and set its address in the environment of each rank.
Under `srun`, or with a TF_CONFIG, there is no store: then the ranks run the rendezvous of `multiworker` at rank 0's
address first, and rank 0 serves the store until it ends.
"""

from __future__ import annotations

import socket

from tfdistkit import env
from tfdistkit.cluster.addresses import host_key, is_on_loopback, split_address
from tfdistkit.cluster.environments import horovod, mpi
from tfdistkit.cluster.own_address import check_own_address
from tfdistkit.cluster.rendezvous.exchange import DEFAULT_TIMEOUT_S, exchange_facts
from tfdistkit.cluster.rendezvous.gloo_store import GlooStore
from tfdistkit.cluster.routes import interface_of, own_ip_towards
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.collectives.horovod_transport import hvd
from tfdistkit.strategies.consistency.versions import facts

# Any of these tells Horovod's MPI its world: set by mpirun, `srun --mpi=pmix` or `srun --mpi=pmi2`.
_MPI_WORLD = (mpi.OPEN_MPI.rank, "PMIX_RANK", "PMI_RANK")

# Facts of rank 0 only: the port and the secret of its store.
_STORE_PORT_FACT = "gloo_store_port"
_STORE_SECRET_FACT = "gloo_store_secret"

# Stores of rank 0, kept open because Horovod may be initialised again.
_stores: list[GlooStore] = []


def run_rendezvous(cluster: ClusterSpec) -> None:
    """Runs the rendezvous of the ranks and sets Horovod's variables, unless a launcher or MPI does.

    Must be called before Horovod is initialised.

    Args:
        cluster: All ranks with their addresses; without them, Horovod's own launchers are needed.

    Raises:
        RendezvousError: if a rank is missing.
        ClusterConfigError: if versions or addresses differ, or this rank's address is not on this machine.
    """
    if not needs_rendezvous(cluster):
        return
    check_own_address(cluster)
    own_facts = facts()
    if cluster.is_chief:
        _stores.append(GlooStore(cluster.world_size, host=_store_host(cluster)))
        own_facts[_STORE_PORT_FACT] = _stores[-1].address[1]
        own_facts[_STORE_SECRET_FACT] = _stores[-1].secret
    facts_of_first = exchange_facts(cluster, own_facts, DEFAULT_TIMEOUT_S).facts[0]
    store = int(facts_of_first[_STORE_PORT_FACT]), str(facts_of_first[_STORE_SECRET_FACT])
    for name, value in _variables(cluster, *store).items():
        env.put(name, value)


def needs_rendezvous(cluster: ClusterSpec) -> bool:
    """Returns whether the ranks need a rendezvous of ours, and have the addresses for it.

    Args:
        cluster: The cluster, as far as it is known.
    """
    if hvd.is_initialized() or cluster.world_size == 1 or not cluster.has_addresses:
        return False
    if env.text(horovod.NAMES.rank) is not None or env.text(horovod.STORE_HOST) is not None:
        return False  # A launcher of Horovod's has set its variables.
    if (env.text(horovod.CONTROLLER) or "").lower() == "mpi":
        return False
    return not (hvd.mpi_built() and any(env.text(name) is not None for name in _MPI_WORLD))


def _variables(cluster: ClusterSpec, store_port: int, store_secret: str) -> dict[str, str]:
    """Returns the variables that Horovod's launcher would set for this rank."""
    variables = {
        **horovod.gloo_variables(cluster),
        **horovod.store_variables(_ip_of(split_address(cluster.workers[0])[0]), store_port, store_secret),
    }
    interface = env.text(horovod.GLOO_INTERFACE) or _interface(cluster)
    return variables if interface is None else {**variables, horovod.GLOO_INTERFACE: interface}


def _store_host(cluster: ClusterSpec) -> str:
    """Returns loopback if all ranks use it; else all interfaces, because peers may use any address of this host."""
    if not is_on_loopback(cluster.workers):
        return "0.0.0.0"
    ip = _ip_of(split_address(cluster.workers[0])[0])
    return ip if "." in ip else "127.0.0.1"


def _interface(cluster: ClusterSpec) -> str | None:
    """Returns the interface that routes to the peers; Gloo resolves this machine's name, which may be loopback."""
    hosts = [host_key(address) for address in cluster.workers]
    own = hosts[cluster.rank]
    others = [rank for rank, host in enumerate(hosts) if host != own] or [cluster.rank]
    ip = own_ip_towards(split_address(cluster.workers[others[0]])[0])
    return None if ip is None else interface_of(ip)


def _ip_of(host: str) -> str:
    """Returns the IP address of a host; Horovod's own client hides an error of the name lookup."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host
