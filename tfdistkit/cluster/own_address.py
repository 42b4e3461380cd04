"""Checks of this process's own address that touch the machine: run just before a server is started there."""

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
    """Checks that this process can be reached under its own address in the cluster.

    TensorFlow's server listens on all interfaces, so it starts happily on the wrong machine, and then every
    process waits for every other. With a taken port it fails without saying which.

    In Kubernetes, where a service's name stands for an address that is on no machine, only the port is
    checked. Elsewhere `TFDISTKIT_CHECK_ADDRESS=0` does the same, for machines behind address translation.

    Args:
        spec: The cluster; nothing is checked for a single process, or for a task without an address.

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
    mend = f"Start this task on the machine of its address, or correct the address or the index in {spec.source}."
    if spec.source == slurm.SOURCE:
        mend = "The names of SLURM's nodes must be in the DNS or in /etc/hosts of all of them; or write a TF_CONFIG."
    do = f"{mend} If others do reach this machine there (address translation), set {env.CHECK_ADDRESS}=0."
    try:
        # Port 0: whether the host is here is one question, whether the port is free another.
        for held in ports.bind(host, 0):
            held.close()
    except socket.gaierror as error:
        what = f"The host of this task's own address does not resolve ({error.strerror})."
        raise ClusterConfigError(
            explain(what, received=_place(spec), expected="a name or address of this machine", do=do)
        ) from None
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        what = "This task's own address is not on this machine."
        raise ClusterConfigError(
            explain(what, received=f"{_place(spec)}; {this_machine}", expected="an address of this machine", do=do)
        ) from None


def _check_port(spec: ClusterSpec, port: int) -> None:
    if not ports.is_free("", port):
        raise taken_port_error(spec, port)


def taken_port_error(spec: ClusterSpec, port: int) -> ClusterConfigError:
    """Returns the error for a port of this task that another process has, naming that process if it can.

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
            received=_place(spec),
            expected="a port that nobody listens on",
            do=f"End the process that holds it (an earlier run?), or {choose}.",
        )
    )


def _place(spec: ClusterSpec) -> str:
    return f"{spec.task.role} {spec.task.index} at {spec.address!r} in {spec.source}"
