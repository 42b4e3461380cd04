"""Exchanges addresses between processes that `mpirun` started: MPI gives them ranks only."""

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

# Not `localhost`: it may resolve to ::1 first, where TensorFlow does not listen.
_THIS_MACHINE = "127.0.0.1"
# Open MPI's options for networks, as interfaces or subnets; the first match is used.
_WANTED = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")
# Addresses of Open MPI's mpirun: `35127296.0;tcp://192.0.2.2,10.0.0.1:40229;tcp6://...`
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_IPV4 = re.compile(r"tcp://([0-9.,]+):")


def can_exchange(cluster: ClusterSpec) -> bool:
    """Returns whether addresses are unknown, and the processes can exchange them through PMIx.

    Args:
        cluster: The cluster of this process.
    """
    return not cluster.has_addresses and cluster.source == mpi.OPEN_MPI.source and pmix.is_served()


def exchange_addresses(cluster: ClusterSpec, timeout_s: float) -> ClusterSpec:
    """Exchanges the addresses of the processes of `mpirun`.

    Args:
        cluster: The cluster of MPI's variables.
        timeout_s: The timeout of the exchange in seconds.

    Returns:
        The cluster with addresses; unchanged without PMIx, or if it has addresses already.

    Raises:
        RendezvousError: if not all processes take part within `timeout_s`.
        MissingDependencyError: if the PMIx library is not found.
        ClusterConfigError: if PMIx fails, or Open MPI's options name an interface that this machine does not have.
    """
    if not can_exchange(cluster):
        return cluster
    is_one_host = cluster.local_world_size == cluster.world_size
    host = _THIS_MACHINE if is_one_host else own_host()
    (port,) = free_ports(1)
    held = bind("", port, exclusive=True)
    try:
        addresses = pmix.exchange(join_address(host, port), cluster.world_size, timeout_s)
    finally:
        for one in held:
            one.close()
    for address in addresses:
        split_address(address)  # raises for an invalid one
    return replace(cluster, addresses={"worker": addresses}, size=None)


def own_host() -> str:
    """Returns the address of this machine for the other hosts of an MPI job.

    Raises:
        ClusterConfigError: if Open MPI's options name an interface that this machine does not have.
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
    """Returns the first address of this machine on one of the interfaces, or in one of the subnets."""
    own = addresses_of_interfaces()
    for word in wanted.split(","):
        if word in own:
            return own[word]
        try:
            network = ipaddress.ip_network(word, strict=False)
        except ValueError:
            continue
        for ip in own.values():
            if ipaddress.ip_address(ip) in network:
                return ip
    known = ", ".join(f"{name} ({ip})" for name, ip in own.items())
    raise ClusterConfigError(
        explain(
            f"`{variable}` must name a network interface or a subnet of this machine.",
            received=f"{variable}={wanted}",
            expected=f"one of: {known}; or a subnet with one of them",
        )
    )
