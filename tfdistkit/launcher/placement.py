"""Where the processes of a job run: hosts, addresses, cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# All workers are on this machine. Not `localhost`: it may stand for ::1 first, where TensorFlow does not listen.
HERE = "127.0.0.1"
LOOPBACK = "lo"


@dataclass(frozen=True)
class Place:
    """Where one process runs.

    Args:
        port: A free TCP port there.
        cores: How many processor cores the processes of the job on that host share.
        host: The host, as the backend knows it.
        address: Where the others reach it.
        interface: The network interface with this address; None where it is not known.
        inherited: The variables that the process inherits there; those that speak of threads are respected.
    """

    port: int
    cores: int
    host: str = HERE
    address: str = HERE
    interface: str | None = LOOPBACK
    inherited: Mapping[str, str] = field(default_factory=dict)


def places_here(ports: Sequence[int], cores: int, inherited: Mapping[str, str]) -> tuple[Place, ...]:
    """Returns places on this machine, one for each port.

    Args:
        ports: Free TCP ports.
        cores: How many processor cores the processes share.
        inherited: The variables that the processes will inherit.
    """
    return tuple(Place(port, cores, inherited=inherited) for port in ports)
