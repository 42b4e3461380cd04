"""Who this process is in its job, and who the others are: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfdistkit.cluster.addresses import host_key
from tfdistkit.errors import ClusterConfigError, explain

# The roles that train a model together, in rank order. With parameter servers the chief is the coordinator: it tells
# the workers what to do, and has no replica of its own.
TRAINING_ROLES = ("chief", "worker")
ROLES = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class TaskSpec:
    """One process of the job.

    Args:
        role: One of `ROLES`.
        index: Which of the processes of that role, from 0.
    """

    role: str = "worker"
    index: int = 0


@dataclass(frozen=True)
class ClusterSpec:
    """All processes of the job and which one this is. Without `addresses` it is a single process.

    Args:
        addresses: Role -> `host:port` of each process of that role, in index order. An empty string stands
            for a process that this one was not told about (a sparse TF_CONFIG).
        task: This process.
        local_rank: Which of the replica processes on this host this is, from 0.
        local_world_size: How many replica processes run on this host.
        source: Where this was read from, for messages: `TF_CONFIG`, `single process`, ...
        size: How many training processes there are, where nobody told their addresses (Horovod, MPI): all of
            them are workers. None counts the addresses.
    """

    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    task: TaskSpec = TaskSpec()
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "single process"
    size: int | None = None

    @property
    def has_servers(self) -> bool:
        """Whether the variables live on parameter servers: then the chief is the coordinator of the workers."""
        return bool(self.addresses.get("ps"))

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the processes with a replica in rank order: the chief first, unless it coordinates."""
        roles = ("worker",) if self.has_servers else TRAINING_ROLES
        return tuple(address for role in roles for address in self.addresses.get(role, ()))

    @property
    def is_complete(self) -> bool:
        """Whether all addresses are known (not so with a sparse TF_CONFIG, or MPI); an evaluator's does not count."""
        known = all(all(self.addresses[role]) for role in self.addresses if role != "evaluator")
        return known and self.has_addresses

    @property
    def has_addresses(self) -> bool:
        """Whether the processes were told of each other's addresses; True for a single process, which needs none."""
        return self.size is None

    @property
    def is_training(self) -> bool:
        """Whether this process takes part in training (a chief or a worker, not a parameter server or evaluator)."""
        return self.task.role in TRAINING_ROLES

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the chief of a cluster with parameter servers, the one process that runs `fit`."""
        return self.has_servers and self.task.role == "chief"

    @property
    def rank(self) -> int:
        """This process's number among those with a replica, from 0; the chief is 0.

        With parameter servers the workers are 0, 1, ... and the coordinator, which has no replica, is 0 as well, so
        that what a script does on rank 0 is done where the script runs: ask `is_chief` for the one process.

        Raises:
            ClusterConfigError: if this process is a parameter server or an evaluator.
        """
        if not self.is_training:
            raise ClusterConfigError(
                explain(
                    "This process takes no part in training, so it has no rank.",
                    received=f"task type {self.task.role!r} in {self.source}",
                    expected="a task type of 'chief' or 'worker'",
                    do='Move `tfdistkit.strategy("parameter_server")` before this line: in a server it does not return.'
                    if self.task.role == "ps"
                    else None,
                )
            )
        before = 0 if self.task.role == "chief" or self.has_servers else len(self.addresses.get("chief", ()))
        return before + self.task.index

    @property
    def world_size(self) -> int:
        """How many processes have a replica: 1 for a single process; with parameter servers, the workers."""
        return self.size or max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and logs: rank 0, or the coordinator where there is one."""
        return self.is_coordinator if self.has_servers else self.is_training and self.rank == 0

    @property
    def address(self) -> str | None:
        """This process's own `host:port`; None for a single process, or when addresses are not known."""
        of_role = self.addresses.get(self.task.role, ())
        return (of_role[self.task.index] or None) if self.task.index < len(of_role) else None


def local_place(addresses: Mapping[str, tuple[str, ...]], task: TaskSpec) -> tuple[int, int]:
    """Derives the local rank from equal hosts in the address list.

    Args:
        addresses: Role -> `host:port` of each process of that role.
        task: This process.

    Returns:
        `(local_rank, local_world_size)`. A process without a replica gets `(0, 1)`.
    """
    spec = ClusterSpec(addresses, task)
    if spec.is_coordinator or not spec.is_training:
        return 0, 1
    hosts = [host_key(address) if address else None for address in spec.workers]
    own = hosts[spec.rank]
    return hosts[: spec.rank].count(own), hosts.count(own)
