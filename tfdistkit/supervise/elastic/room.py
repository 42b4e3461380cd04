"""Tracks the hosts and slots of a job by a discovery script or the room of a cluster, and preemption notices."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from tfdistkit import env
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.elasticity import ElasticSpec
from tfdistkit.launcher.hosts import is_this_machine, spread
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.supervise.elastic.discovery import Discovery
from tfdistkit.supervise.elastic.membership import Membership
from tfdistkit.supervise.elastic.notices import Notice, Notices

_HERE = "localhost"


class Room:
    """Tracks the hosts that a job may use now.

    Args:
        job: The job as the user requested it.
        note: Shows a message to the user.

    Raises:
        OptionError: if a fixed list of hosts has too few slots.
    """

    def __init__(self, job: JobSpec, note: Callable[[str], None]):
        self._elastic = job.elastic
        # A command that runs when the launcher is killed has the job's mark, so the watchdog ends it.
        variables = env.child_env({env.JOB_ID: job.job_id})
        script = job.elastic.discovery if job.elastic is not None else None
        capacity = row_of(job.backend).capacity if job.elastic is not None and job.hosts is not None else None
        # What tells the hosts: the user's script, or the cluster. Others do not change.
        self.discovery = Discovery(script, variables, note) if script else None
        if capacity is not None:
            self.discovery = row_of(job.backend).load(capacity)(job, note)
        self._notices = Notices(job.preemption, variables, note) if job.preemption is not None else None
        self._job = job
        self.members = Membership(self._first_hosts(), *_bounds(job), is_fixed=self.discovery is None)
        self._notice: Notice | None = None
        # Workers by host in the current attempt.
        self._used: Counter[str] = Counter()
        # The name of the host of each process, where the cluster has chosen it.
        self._nodes: Sequence[str] = ()

    @property
    def signals(self) -> tuple[int, ...]:
        """The signal that ends the job, if a notice announced its end."""
        return () if self._notice is None or self._leaves(self._notice) else (signal.SIGTERM,)

    @property
    def notice(self) -> Notice | None:
        """The current preemption notice."""
        return self._notice

    @property
    def is_fixed(self) -> bool:
        """Whether no host can be added, because neither a script nor a cluster tells the hosts."""
        return self.discovery is None

    def poll(self) -> None:
        """Reads the discovered hosts and the preemption notices; never waits."""
        hosts = self.discovery.poll() if self.discovery is not None else None
        if hosts is not None:
            self.members.replace(hosts)
        if self._notices is not None:
            self._notice = self._notices.poll(self.members.names)
            self.members.leave(self._notice.hosts if self._notice is not None else ())

    def require_hosts(self, should_stop: Callable[[], bool]) -> None:
        """Waits for the first list of the hosts, or of a cluster for a list from after now.

        Args:
            should_stop: Whether to stop waiting.

        Raises:
            OptionError: if there is none.
        """
        if self.discovery is not None:
            self.discovery.renew()
        while self.discovery is not None and not (self.members.names and self.discovery.is_current):
            if should_stop():
                return
            self.poll()
            if self.discovery.problem:
                raise OptionError(self.discovery.problem)
            time.sleep(0.02)

    def job_now(self) -> JobSpec:
        """Returns the job with the current number of workers and hosts, and records them as used."""
        now = time.monotonic()
        slots, size = self.members.available(now), self.members.world_size(now)
        self._used = Counter(slots[index].host for index in spread(slots, size))
        used = [one for one in slots if self._used[one.host]]
        if self._job.hosts is None and all(is_this_machine(one.host.rpartition("@")[2]) for one in used):
            return replace(self._job, world_size=size)
        hosts = self._job.hosts or (self._elastic.remote if self._elastic is not None else None)
        assert hosts is not None
        return replace(self._job, world_size=size, hosts=hosts.limited_to(slots, size))

    def settle(self, nodes: Sequence[str]) -> None:
        """Records where a cluster has placed the processes of an attempt.

        Args:
            nodes: The name of the node of each process; empty if the plan of `job_now` holds.
        """
        if self.discovery is not None and nodes:
            self._nodes, self._used = nodes, Counter(nodes)

    def name_of(self, process: ProcessSpec) -> str:
        """Returns the name in the list for the host of a process.

        Args:
            process: The process.
        """
        if self._nodes:
            return self._nodes[process.number]
        if process.host in self._used:
            return process.host
        return next(iter(self._used), process.host)

    @property
    def tells_life(self) -> bool:
        """Whether the list of hosts itself tells which of them live: that of a cluster does."""
        return bool(self._nodes)

    def is_urgent(self) -> bool:
        """Returns whether a host in use is about to end or has been taken from the list."""
        slots = {one.host: one.slots for one in self.members.available(time.monotonic())}
        return any(slots.get(host, 0) < workers for host, workers in self._used.items())

    def close(self) -> None:
        """Ends the runs of commands."""
        for one in (self.discovery, self._notices):
            if one is not None:
                one.close()

    def _leaves(self, notice: Notice) -> bool:
        """Returns whether the job can answer a notice by leaving hosts: it is elastic, and enough others are left."""
        if self._elastic is None or not notice.hosts:
            return False
        return not self.is_fixed or self.members.world_size(time.monotonic()) >= self._elastic.least

    def _first_hosts(self) -> Sequence[HostSlots]:
        if self.discovery is not None:
            return ()
        hosts = self._job.hosts
        slots = hosts.fixed_slots if hosts is not None else (HostSlots(_HERE, _bounds(self._job)[1]),)
        total, elastic = sum(one.slots for one in slots), self._elastic
        if elastic is not None and total < elastic.least:
            what = f"MIN of `-np MIN:MAX` must be at most {total}, the number of slots."
            do = hosts.how_to_add_slots if hosts is not None else None
            raise OptionError(explain(what, received=f"-np {elastic}", do=do))
        return slots


def _bounds(job: JobSpec) -> tuple[int, int]:
    elastic: ElasticSpec | None = job.elastic
    return (job.world_size, job.world_size) if elastic is None else (elastic.least, elastic.most)
