"""The placement of a job's processes: hosts, addresses, cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# The address of workers on this machine. Not `localhost`: it may resolve to ::1, where TensorFlow does not listen.
HERE = "127.0.0.1"
LOOPBACK = "lo"


@dataclass(frozen=True)
class Place:
    """The placement of one process.

    Args:
        port: A free TCP port on the host.
        cores: The number of processor cores that the job's processes on that host share.
        host: The host's name in the backend.
        address: The address that peers connect to.
        interface: The network interface with this address; None if unknown.
        inherited: The variables that the process inherits on the host; its thread counts take precedence.
    """

    port: int
    cores: int
    host: str = HERE
    address: str = HERE
    interface: str | None = LOOPBACK
    inherited: Mapping[str, str] = field(default_factory=dict)


def places_here(ports: Sequence[int], cores: int, inherited: Mapping[str, str]) -> tuple[Place, ...]:
    """Returns placements on this machine, one per port.

    Args:
        ports: Free TCP ports.
        cores: The number of processor cores that the processes share.
        inherited: The variables that the processes will inherit.
    """
    return tuple(Place(port, cores, inherited=inherited) for port in ports)
