"""Describes the hosts of a job and their slots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostSlots:
    """Describes a host that a job may use.

    Args:
        host: The name or address.
        slots: The number of processes on it, >= 1.
    """

    host: str
    slots: int
