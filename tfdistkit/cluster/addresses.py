"""Splits, joins and compares `host:port` addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from tfdistkit.errors import ClusterConfigError, explain

# Loopback names, valid on every machine.
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "ip6-localhost", "localhost.localdomain"})
# "All interfaces": a server can listen there, but no other machine can connect to it.
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})

_EXPECTED = "host:port, such as 'node1:12345', '10.0.0.1:12345' or '[fd00::1]:12345'"


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`.

    Args:
        address: A host name, an IPv4 address or an IPv6 address in brackets, then a colon and a port.

    Returns:
        The host without brackets, and the port.

    Raises:
        ClusterConfigError: if the host or the port is missing, or the port is not an integer from 1 to 65535.
    """
    received = repr(address)
    if "://" in address or "/" in address or any(character.isspace() for character in address):
        raise ClusterConfigError(
            explain("An address must contain only a host and a port.", received=received, expected=_EXPECTED)
        )
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        raise ClusterConfigError(explain("An address must have a port.", received=received, expected=_EXPECTED))
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ClusterConfigError(
            explain("An IPv6 address must be in brackets and have a port.", received=received, expected=_EXPECTED)
        )
    if not host:
        raise ClusterConfigError(explain("An address must have a host.", received=received, expected=_EXPECTED))
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ClusterConfigError(
            explain("The port of an address must be an integer from 1 to 65535.", received=received, expected=_EXPECTED)
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Joins a host and a port.

    Args:
        host: A host name or address, an IPv6 address without brackets.
        port: The TCP port.

    Returns:
        `host:port`, with brackets around an IPv6 host.
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_key(address: str) -> str:
    """Returns the host of an address in a canonical form for comparison.

    Args:
        address: `host:port`.

    Returns:
        The host in lower case; `localhost` for every loopback name.

    Raises:
        ClusterConfigError: if the address is invalid.
    """
    host = split_address(address)[0].lower()
    return "localhost" if host in LOOPBACK_HOSTS else host


def is_on_loopback(addresses: Sequence[str]) -> bool:
    """Returns whether all addresses are on loopback, so that no other machine can connect.

    Args:
        addresses: Each `host:port`.

    Returns:
        False for a name that needs a lookup: its address may change.
    """
    return all(_is_loopback(split_address(address)[0]) for address in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_HOSTS
