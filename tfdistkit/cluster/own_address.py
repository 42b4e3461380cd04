"""Checks this process's own address against this machine, just before TensorFlow's server starts there."""

from __future__ import annotations

import errno
import socket

from tfdistkit import env
from tfdistkit.cluster import ports
from tfdistkit.cluster.addresses import split_address
from tfdistkit.cluster.environments import slurm
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, explain


def check_own_address(spec: ClusterSpec) -> None:
    """Checks that peers can reach this process under its own address in the cluster.

    TensorFlow's server listens on all interfaces, so on the wrong machine it starts without an error, and all
    processes wait for each other. If its port is taken, it fails without naming the port.

    In Kubernetes, where the name of a service resolves to an address of no machine, checks only the port.
    `TFDISTKIT_CHECK_ADDRESS=0` does the same elsewhere, for machines behind network address translation.

    Args:
        spec: The cluster. A single process, or a task without an address, is not checked.

    Raises:
        ClusterConfigError: if the host does not resolve, is another machine, or the port is taken.
    """
    if not spec.address:
        return
    host, port = split_address(spec.address)
    if env.checks_own_address():
        _check_host(spec, host)
    _check_port(spec, port)


def _check_host(spec: ClusterSpec, host: str) -> None:
    this_machine = f"this machine is {socket.gethostname()}"
    fix = f"Start this task on the machine of its address, or correct the address or the index in {spec.source}."
    if spec.source == slurm.SOURCE:
        fix = "Enter the names of SLURM's nodes in the DNS or in /etc/hosts of all nodes, or write a TF_CONFIG."
    do = f"{fix} If peers do reach this machine there (address translation), set {env.CHECK_ADDRESS}=0."
    try:
        # Port 0: checks the host only; `_check_port` checks the port.
        for held in ports.bind(host, 0):
            held.close()
    except socket.gaierror as error:
        what = f"The host of this task's own address does not resolve ({error.strerror})."
        raise ClusterConfigError(
            explain(what, received=_described(spec), expected="a name or address of this machine", do=do)
        ) from None
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        what = "This task's own address is not on this machine."
        raise ClusterConfigError(
            explain(what, received=f"{_described(spec)}; {this_machine}", expected="an address of this machine", do=do)
        ) from None


def _check_port(spec: ClusterSpec, port: int) -> None:
    if not ports.is_free("", port):
        raise taken_port_error(spec, port)


def taken_port_error(spec: ClusterSpec, port: int) -> ClusterConfigError:
    """Returns the error for a port of this task that another process holds, with the name of that process if known.

    Args:
        spec: The cluster.
        port: The port of this task.

    Returns:
        An error to raise.
    """
    choose = f"choose another port in {spec.source}"
    if spec.source == slurm.SOURCE:
        choose = f"set {env.PORT} to another first port in all tasks"
    return ClusterConfigError(
        explain(
            f"Port {port} of this task is taken on this host{ports.holder(port)}.",
            received=_described(spec),
            expected="a free port",
            do=f"End the process that holds it (an earlier run?), or {choose}.",
        )
    )


def _described(spec: ClusterSpec) -> str:
    return f"{spec.task.role} {spec.task.index} at {spec.address!r} in {spec.source}"
