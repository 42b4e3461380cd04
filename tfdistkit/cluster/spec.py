"""Describes a job and the task of this process in it, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfdistkit.cluster.addresses import host_key
from tfdistkit.errors import ClusterConfigError, explain

# The training roles, in rank order. With parameter servers the chief is the coordinator: it schedules steps on the
# workers, and has no replica.
TRAINING_ROLES = ("chief", "worker")
ROLES = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class TaskSpec:
    """Describes one process of the job.

    Args:
        role: One of `ROLES`.
        index: Its index within the role, from 0.
    """

    role: str = "worker"
    index: int = 0


@dataclass(frozen=True)
class ClusterSpec:
    """Describes all processes of the job, and the task of this one. Without `addresses` it is a single process.

    Args:
        addresses: Role -> `host:port` of each process of that role, in index order. An empty string stands
            for an unknown address (in a sparse TF_CONFIG).
        task: This process.
        local_rank: The rank of this process among the replica processes on this host, from 0.
        local_world_size: The number of replica processes on this host.
        source: The source of the description, for messages: `TF_CONFIG`, `single process`, ...
        size: The number of training processes if their addresses are unknown (Horovod, MPI): all are workers.
            None counts the addresses.
    """

    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    task: TaskSpec = TaskSpec()
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "single process"
    size: int | None = None

    @property
    def has_servers(self) -> bool:
        """Returns whether variables live on parameter servers: then the chief is the coordinator."""
        return bool(self.addresses.get("ps"))

    @property
    def workers(self) -> tuple[str, ...]:
        """Returns the addresses of the replica processes in rank order: a chief that is no coordinator comes first."""
        roles = ("worker",) if self.has_servers else TRAINING_ROLES
        return tuple(address for role in roles for address in self.addresses.get(role, ()))

    @property
    def is_complete(self) -> bool:
        """Returns whether all addresses are known, an evaluator's aside; False with a sparse TF_CONFIG, or MPI."""
        known = all(all(self.addresses[role]) for role in self.addresses if role != "evaluator")
        return known and self.has_addresses

    @property
    def has_addresses(self) -> bool:
        """Returns whether the description has addresses; True for a single process, which needs none."""
        return self.size is None

    @property
    def is_training(self) -> bool:
        """Returns whether this process trains: a chief or a worker, not a parameter server or an evaluator."""
        return self.task.role in TRAINING_ROLES

    @property
    def is_coordinator(self) -> bool:
        """Returns whether this is the chief of a cluster with parameter servers: it runs `fit`."""
        return self.has_servers and self.task.role == "chief"

    @property
    def rank(self) -> int:
        """Returns the rank of this process among the replica processes, from 0; the chief is 0.

        With parameter servers the workers have ranks 0, 1, ..., and the coordinator, which has no replica, has rank 0
        too, so that code for rank 0 runs where the script runs. `is_chief` is True for one process only.

        Raises:
            ClusterConfigError: if this process is a parameter server or an evaluator.
        """
        if not self.is_training:
            raise ClusterConfigError(
                explain(
                    "The rank is defined for training processes only.",
                    received=f"task type {self.task.role!r} in {self.source}",
                    expected="a task type of 'chief' or 'worker'",
                    do='Call `tfdistkit.strategy("parameter_server")` before this line: it does not return in a server.'
                    if self.task.role == "ps"
                    else None,
                )
            )
        before = 0 if self.task.role == "chief" or self.has_servers else len(self.addresses.get("chief", ()))
        return before + self.task.index

    @property
    def world_size(self) -> int:
        """Returns the number of replica processes: 1 for a single process; with parameter servers, the workers."""
        return self.size or max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Returns whether this process writes checkpoints and logs: rank 0, or the coordinator if there is one."""
        return self.is_coordinator if self.has_servers else self.is_training and self.rank == 0

    @property
    def address(self) -> str | None:
        """Returns the `host:port` of this process; None for a single process, or if addresses are unknown."""
        of_role = self.addresses.get(self.task.role, ())
        return (of_role[self.task.index] or None) if self.task.index < len(of_role) else None


def local_place(addresses: Mapping[str, tuple[str, ...]], task: TaskSpec) -> tuple[int, int]:
    """Derives the local rank from the equal hosts in the address list.

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
