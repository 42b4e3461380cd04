"""Checks whether other machines can connect to jobs: TensorFlow's servers need no authentication."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from collections.abc import Mapping

from tfdistkit import env
from tfdistkit.doctor.findings import Finding, Level

_NAME = "exposure"
# Most addresses in the message.
_SHOWN = 4
_DEADLINE_S = 30.0
# IPv6 addresses of this network namespace: address, index, length of the prefix, scope, flags, interface.
_IPV6_FILE = "/proc/net/if_inet6"
_LINK_LOCAL = "20"

_TRY_ISOLATION = "from tfdistkit.launcher.local.isolation import isolate; isolate()"
_FIREWALL = "let a firewall accept connections only from the hosts of your jobs; see docs/security.md"


def check_exposure(interfaces: Mapping[str, str]) -> Finding:
    """Returns a warning if this machine has an address outside of loopback, under which jobs are reachable.

    A firewall in between cannot be detected from here.

    Args:
        interfaces: The network interfaces with an IPv4 address: name -> address.
    """
    addresses = [*interfaces.items(), *_ipv6_addresses()]
    outside = [f"{name} {address}" for name, address in addresses if not ipaddress.ip_address(address).is_loopback]
    if not outside:
        return Finding("network", _NAME, Level.GOOD, "none: this machine has only loopback addresses")
    more = f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else ""
    text = (
        f"multiworker and parameter_server listen on {', '.join(outside[:_SHOWN])}{more} without authentication:\n"
        "every host that can connect, unless a firewall prevents it, can run code with your permissions"
    )
    alone = "For jobs on this machine only, use tfdistkit run --isolate. For others, " if _can_isolate() else ""
    do = alone + _FIREWALL
    return Finding("network", _NAME, Level.WARNING, text, do[0].upper() + do[1:])


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Returns (interface, address) without link-local addresses, which every interface has."""
    try:
        with open(_IPV6_FILE, encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return []
    return [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows if row[3] != _LINK_LOCAL]


def _can_isolate() -> bool:
    """Tries the isolation in a separate process, because it is irreversible."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_ISOLATION],
            env=env.child_env({}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
