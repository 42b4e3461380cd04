"""Who else could reach the ports of jobs: TensorFlow's servers listen on all interfaces, and ask for no credentials."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from collections.abc import Mapping

from tfdistkit import env
from tfdistkit.doctor.findings import Finding, Level

_NAME = "exposure"
# So many addresses are named.
_SHOWN = 4
_DEADLINE_S = 30.0
# IPv6 addresses of this network namespace: address, index, length of the prefix, scope, flags, interface.
_IPV6_FILE = "/proc/net/if_inet6"
_LINK_LOCAL = "20"

_TRY_ISOLATION = "from tfdistkit.launcher.local.isolation import isolate; isolate()"
_FIREWALL = "close this machine's ports to all but the hosts of your jobs by a firewall; see docs/security.md"


def look_at_exposure(interfaces: Mapping[str, str]) -> Finding:
    """Returns whether others could reach what jobs listen on: a warning where this machine has more than loopback.

    Whether a firewall keeps them out cannot be seen from here.

    Args:
        interfaces: The network interfaces with an IPv4 address: name -> address.
    """
    addresses = [*interfaces.items(), *_ipv6_addresses()]
    outside = [f"{name} {address}" for name, address in addresses if not ipaddress.ip_address(address).is_loopback]
    if not outside:
        return Finding("network", _NAME, Level.GOOD, "none: this machine has no address but those of loopback")
    more = f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else ""
    told = (
        f"multiworker and parameter_server listen on {', '.join(outside[:_SHOWN])}{more}, too, without credentials:\n"
        "whoever reaches their ports can do what your jobs can, unless a firewall keeps them out"
    )
    alone = "For jobs on this machine alone, tfdistkit run --isolate. For others, " if _can_isolate() else ""
    do = alone + _FIREWALL
    return Finding("network", _NAME, Level.WARNING, told, do[0].upper() + do[1:])


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Those that are not of one link alone: every interface has one of these."""
    try:
        with open(_IPV6_FILE, encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return []
    return [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows if row[3] != _LINK_LOCAL]


def _can_isolate() -> bool:
    """Tried in a process of its own, which ends with it."""
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
