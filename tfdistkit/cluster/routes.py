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


def addresses_of_interfaces() -> dict[str, str]:
    """Returns the first IPv4 address of each network interface of this machine that has one; none without psutil."""
    try:
        import psutil  # the ground floor works without it
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
        Its name, such as `eth0`; None when it is the first one of no interface.
    """
    return next((name for name, own in addresses_of_interfaces().items() if own == ip), None)
