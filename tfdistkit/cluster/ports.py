"""Finds free TCP ports on this host, and binds them."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Any

from tfdistkit.cluster import port_locks
from tfdistkit.cluster.addresses import LOOPBACK_HOSTS
from tfdistkit.errors import ClusterConfigError, OptionError, explain

# Lower ports belong to well-known services and servers that users start by hand.
_LOWEST_PORT = 10_000
_HIGHEST_PORT = 65_535
# Ephemeral ports for outgoing connections; the default if the system does not tell (RFC 6335, section 6).
_EPHEMERAL_DEFAULT = (49_152, 65_535)
_EPHEMERAL_FILE = "/proc/sys/net/ipv4/ip_local_port_range"

# Ports that `free_ports` has returned in this process.
_given: set[int] = set()


def is_free(host: str, port: int) -> bool:
    """Returns whether a server could listen on `port` now.

    Args:
        host: A name or address of this machine; an empty string means all interfaces, which is where
            TensorFlow's server listens.
        port: The TCP port, from 1 to 65535.

    Returns:
        False if a process holds the port, or `host` is not an address of this machine.
    """
    try:
        sockets = bind(host, port)
    except OSError:
        return False
    for held in sockets:
        held.close()
    return True


def bind(host: str, port: int, *, exclusive: bool = False) -> list[socket.socket]:
    """Binds a TCP port as TensorFlow's server would (SO_REUSEADDR, no SO_REUSEPORT), without listening.

    Args:
        host: A name or address of this machine; an empty string means all interfaces, IPv4 and IPv6.
        port: The TCP port.
        exclusive: Without SO_REUSEADDR: no other process can bind the port while these sockets are open, and
            a port with connections that ended a moment ago (TIME_WAIT) counts as taken.

    Returns:
        One bound socket for each address that `host` resolves to.

    Raises:
        OSError: if the port is taken, or `host` is not on this machine.
    """
    addresses = _wildcards(port) if host == "" else _resolve(host, port)
    held: list[socket.socket] = []
    try:
        for family, address in addresses:
            held.append(_bound_socket(family, address, exclusive))
    except BaseException:
        for one in held:
            one.close()
        raise
    return held


def bind_loopback(host: str, port: int) -> list[socket.socket]:
    """Binds a TCP port on loopback only, after checking that TensorFlow's server could bind it on all interfaces.

    Args:
        host: A loopback address, or one of the names of loopback.
        port: The TCP port.

    Returns:
        Bound sockets for the address, or for all addresses of the name.

    Raises:
        OSError: if the port is taken on any interface, or this machine has no such address.
    """
    for held in bind("", port):
        held.close()
    if host.lower() not in LOOPBACK_HOSTS or host[0].isdigit():
        return bind(host, port)
    result = bind("127.0.0.1", port)
    with contextlib.suppress(OSError):  # IPv6 is switched off, or has no loopback address
        result += bind("::1", port)
    return result


def free_ports(count: int) -> list[int]:
    """Finds distinct TCP ports that are free on all interfaces of this host.

    No other process of tfdistkit gets one of them while this one lives (see `port_locks`). They lie outside the
    ephemeral range, and the search starts at a random port, so other programs rarely take one before it is used.

    Args:
        count: The number of ports, >= 0.

    Returns:
        `count` distinct port numbers.

    Raises:
        OptionError: if `count` is negative.
        ClusterConfigError: if this host has fewer free ports.
    """
    if count < 0:  # not `require_integer`: the agent on other hosts gets this module without `validation`
        raise OptionError(explain("`count` must be an integer >= 0.", received=f"count={count}"))
    candidates = _candidates()
    found: list[int] = []
    # Ports returned earlier may belong to a running job of this process, so they come last.
    for port in [*(p for p in candidates if p not in _given), *(p for p in candidates if p in _given)]:
        if len(found) == count:
            break
        if _take(port):
            found.append(port)
    _given.update(found)
    if len(found) < count:
        raise ClusterConfigError(
            explain(
                "This host has too few free ports.",
                received=f"{len(found)} free ports from {_LOWEST_PORT} to {_HIGHEST_PORT}",
                expected=str(count),
            )
        )
    return found


def _take(port: int) -> bool:
    if not port_locks.lock(port):
        return False
    try:
        sockets = bind("", port, exclusive=True)
    except OSError:
        if port not in _given:
            port_locks.unlock(port)
        return False
    for one in sockets:
        one.close()
    return True


def holder(port: int) -> str:
    """Returns the name of the process that holds a TCP port on this host, if it can be found.

    Args:
        port: The TCP port.

    Returns:
        ` by python3 (pid 123)`, or an empty string if psutil is missing or the process belongs to another user.
    """
    try:
        import psutil  # loaded only for an error; this package works without it

        connections = psutil.net_connections(kind="tcp")
        pids = {one.pid for one in connections if one.pid and one.laddr and one.laddr.port == port}
        return "".join(f" by {psutil.Process(pid).name()} (pid {pid})" for pid in sorted(pids)[:1])
    except Exception:  # a failed lookup (permissions, races) must not hide the original error
        return ""


def _candidates() -> list[int]:
    """Returns all ports in the order to try: those outside the ephemeral range first, each part from a random start."""
    low, high = _ephemeral_range()
    ports = range(_LOWEST_PORT, _HIGHEST_PORT + 1)
    stable = [port for port in ports if not low <= port <= high]
    ephemeral = [port for port in ports if low <= port <= high]
    return _rotated(stable) + _rotated(ephemeral)


def _rotated(ports: list[int]) -> list[int]:
    if not ports:
        return []
    # Not the global generator: a script that seeds `random` would choose the same ports for all of its jobs.
    start = random.SystemRandom().randrange(len(ports))
    return ports[start:] + ports[:start]


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open(_EPHEMERAL_FILE, encoding="ascii") as file:
            low, high = file.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _EPHEMERAL_DEFAULT


def _wildcards(port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Returns the wildcard address: one IPv6 socket accepts IPv4 too; without IPv6 the IPv4 wildcard."""
    return [(socket.AF_INET6, ("::", port))] if has_ipv6() else [(socket.AF_INET, ("0.0.0.0", port))]


def has_ipv6() -> bool:
    """Returns whether this machine can open IPv6 sockets (containers often cannot)."""
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound_socket(family: socket.AddressFamily, address: tuple[Any, ...], exclusive: bool) -> socket.socket:
    result = socket.socket(family, socket.SOCK_STREAM)
    try:
        if not exclusive:
            result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            result.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        result.bind(address)
    except BaseException:
        result.close()
        raise
    return result
