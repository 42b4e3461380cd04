"""Which of this machine's addresses and interfaces lead to another host."""

from __future__ import annotations

import socket


def own_ip_towards(host: str) -> str | None:
    """Returns the address that this machine would speak from to another host; nothing is sent.

    Args:
        host: A name or address, of this machine too.

    Returns:
        An IPv4 address of this machine, which that host can answer to; None when there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # the port does not matter
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(ip: str) -> str | None:
    """Returns the network interface that has an address.

    Args:
        ip: An IPv4 address of this machine.

    Returns:
        Its name, such as `eth0`; None when no interface has it, or psutil is missing.
    """
    try:
        import psutil  # the ground floor works without it
    except ImportError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == ip for one in addresses):
            return name
    return None
