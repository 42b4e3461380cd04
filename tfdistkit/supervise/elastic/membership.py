"""Keeps the hosts that an elastic job may use, after losses and failures: plain data; callers pass the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfdistkit.cluster.environments.host_list import HostSlots

# A host that fails twice within this time is left out.
_MEMORY_S = 600.0
_FAILURES = 2
# How long a host is left out: twice as long after each further failure.
_FIRST_S, _LONGEST_S = 60.0, 3600.0


class Membership:
    """The hosts of an elastic job.

    Args:
        hosts: The hosts with their slots.
        least: The fewest workers.
        most: The most workers.
        is_fixed: Whether the list of hosts is fixed, without a discovery script: then a lost slot does not come back.
    """

    def __init__(self, hosts: Sequence[HostSlots], least: int, most: int, is_fixed: bool):
        self._hosts = tuple(hosts)
        self._least, self._most, self._is_fixed = least, most, is_fixed
        self._lost: dict[str, int] = {}
        self._failures: dict[str, list[float]] = {}
        self._unreachable_until: dict[str, float] = {}
        self._leaving: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return tuple(one.host for one in self._hosts)

    def replace(self, hosts: Sequence[HostSlots]) -> None:
        """Replaces the list of hosts."""
        self._hosts = tuple(hosts)

    def leave(self, hosts: Iterable[str]) -> None:
        """Sets the hosts that are about to be preempted."""
        self._leaving = frozenset(hosts)

    def lose(self, host: str, workers: int, now: float, is_unreachable: bool) -> None:
        """Records that workers of a host failed.

        Args:
            host: The host.
            workers: The number of lost workers.
            now: The time, in seconds.
            is_unreachable: Whether the host itself is gone.
        """
        times = [*(time for time in self._failures.get(host, ()) if now - time < _MEMORY_S), now]
        self._failures[host] = times
        if is_unreachable:
            self._unreachable_until[host] = now + self._left_out_s(times)
        if self._is_fixed:
            slots = next((one.slots for one in self._hosts if one.host == host), 0)
            self._lost[host] = slots if is_unreachable else self._lost.get(host, 0) + workers

    def forgive(self) -> None:
        """Gives lost slots back, for a restart of the whole job."""
        self._lost.clear()

    def left_out(self, now: float) -> dict[str, float]:
        """Returns the hosts that are not used because of repeated failures, with the remaining seconds."""
        left = {host: self._until(host) - now for host in self.names if self._until(host) > now}
        used = sum(one.slots for one in self._present(now) if one.host not in left)
        # A host that failed is better than too few workers, if it answers.
        doubtful = {host for host in left if self._unreachable_until.get(host, 0.0) <= now}
        return left if used >= self._least else {host: left[host] for host in left if host not in doubtful}

    def available(self, now: float) -> tuple[HostSlots, ...]:
        """Returns the hosts to use now, in order.

        Args:
            now: The time, in seconds.
        """
        left_out = self.left_out(now)
        return tuple(one for one in self._present(now) if one.host not in left_out)

    def world_size(self, now: float) -> int:
        """Returns the number of workers that fit on the hosts, at most the job's maximum."""
        return min(self._most, sum(one.slots for one in self.available(now)))

    def _present(self, now: float) -> list[HostSlots]:
        rooms = [(one.host, one.slots - self._lost.get(one.host, 0)) for one in self._hosts]
        return [HostSlots(host, slots) for host, slots in rooms if slots > 0 and host not in self._leaving]

    def _until(self, host: str) -> float:
        """Returns the time until which a host is left out."""
        times: Sequence[float] = self._failures.get(host, [])
        again = times[-1] + self._left_out_s(times) if len(times) >= _FAILURES else 0.0
        return max(again, self._unreachable_until.get(host, 0.0))

    @staticmethod
    def _left_out_s(times: Sequence[float]) -> float:
        return min(_LONGEST_S, _FIRST_S * 2.0 ** max(0, min(len(times), 12) - _FAILURES))
