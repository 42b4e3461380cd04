"""Addresses for processes that MPI's launcher started: it tells each its rank, and they tell each other the rest."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import replace

from tfdistkit import env
from tfdistkit.cluster.addresses import join_address, split_address
from tfdistkit.cluster.environments import mpi, pmix
from tfdistkit.cluster.ports import bind, free_ports
from tfdistkit.cluster.routes import addresses_of_interfaces, own_ip_towards
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, explain

# Not `localhost`: it may stand for ::1 first, where TensorFlow does not listen.
_THIS_MACHINE = "127.0.0.1"
# Open MPI's own choice of networks, as names of interfaces or as subnets; of it, what comes first counts here.
_WANTED = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")
# Where Open MPI's mpirun is: `35127296.0;tcp://192.0.2.2,10.0.0.1:40229;tcp6://...`
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_IPV4 = re.compile(r"tcp://([0-9.,]+):")


def can_exchange(cluster: ClusterSpec) -> bool:
    """Whether nobody told addresses, but the processes can tell each other theirs.

    Args:
        cluster: What was found.
    """
    return not cluster.has_addresses and cluster.source == mpi.OPEN_MPI.source and pmix.is_served()


def exchange_addresses(cluster: ClusterSpec, timeout_s: float) -> ClusterSpec:
    """Lets the processes of `mpirun` tell each other their addresses.

    Args:
        cluster: What MPI's variables tell.
        timeout_s: How long to wait for the others, in seconds.

    Returns:
        The cluster with addresses; the same one where there is no PMIx, or addresses are there already.

    Raises:
        RendezvousError: if the others do not come within `timeout_s`.
        MissingDependencyError: if PMIx's library is not found.
        ClusterConfigError: if PMIx fails, or Open MPI was given an interface that is not here.
    """
    if not can_exchange(cluster):
        return cluster
    is_one_host = cluster.local_world_size == cluster.world_size
    host = _THIS_MACHINE if is_one_host else own_host()
    (port,) = free_ports(1)
    held = bind("", port, exclusive=True)
    try:
        told = pmix.exchange(join_address(host, port), cluster.world_size, timeout_s)
    finally:
        for one in held:
            one.close()
    for address in told:
        split_address(address)  # whatever is wrong with it is told here
    return replace(cluster, addresses={"worker": told}, size=None)


def own_host() -> str:
    """Returns the address of this machine by which the other hosts of an MPI job reach it.

    Raises:
        ClusterConfigError: if Open MPI was given an interface that is not here.
    """
    for variable in _WANTED:
        wanted = env.text(variable)
        if wanted is not None:
            return _address_in(wanted, variable)
    towards = _IPV4.findall(env.text(_MPIRUN) or "")
    for ip in towards[0].split(",") if towards else ():
        own = own_ip_towards(ip)
        if own is not None and not ipaddress.ip_address(own).is_loopback:
            return own
    return socket.gethostname()


def _address_in(wanted: str, variable: str) -> str:
    """The first of this machine's addresses on one of the interfaces, or in one of the subnets."""
    here = addresses_of_interfaces()
    for word in wanted.split(","):
        if word in here:
            return here[word]
        try:
            network = ipaddress.ip_network(word, strict=False)
        except ValueError:
            continue
        for ip in here.values():
            if ipaddress.ip_address(ip) in network:
                return ip
    known = ", ".join(f"{name} ({ip})" for name, ip in here.items())
    raise ClusterConfigError(
        explain(
            "Open MPI was told of network interfaces that this machine does not have.",
            received=f"{variable}={wanted}",
            expected=f"one of: {known}; or a subnet with one of them",
        )
    )
