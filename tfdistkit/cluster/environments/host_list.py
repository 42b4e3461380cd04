"""Hosts, and how many processes each of them takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostSlots:
    """A host that a job may use.

    Args:
        host: Its name or address.
        slots: How many processes it takes, 1 or more.
    """

    host: str
    slots: int
