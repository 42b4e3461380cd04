"""Finds the addresses and network interfaces of this machine that lead to another host."""

from __future__ import annotations

import socket


def own_ip_towards(host: str) -> str | None:
    """Returns the source address of connections from this machine to another host; sends nothing.

    Args:
        host: A name or address; it may be this machine's.

    Returns:
        An IPv4 address of this machine; None without a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # the port does not matter
        except OSError:
            return None
        return str(probe.getsockname()[0])


def addresses_of_interfaces() -> dict[str, str]:
    """Returns the first IPv4 address of each network interface of this machine; nothing without psutil."""
    try:
        import psutil  # this package works without it
    except ImportError:
        return {}
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET:
                found.setdefault(name, one.address)
    return found


def interface_of(ip: str) -> str | None:
    """Returns the network interface that has an address.

    Args:
        ip: An IPv4 address of this machine.

    Returns:
        The name, such as `eth0`; None if it is not the first address of any interface.
    """
    return next((name for name, own in addresses_of_interfaces().items() if own == ip), None)
