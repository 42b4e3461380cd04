"""Detects descriptions of two different jobs in one environment."""

from __future__ import annotations

from collections.abc import Mapping

from tfdistkit import env
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, explain

# Longer values are shortened in messages (characters).
_LONGEST_VALUE = 200


def require_agreement(
    used: ClusterSpec,
    used_variables: Mapping[str, str],
    other: ClusterSpec,
    other_variables: Mapping[str, str],
    names: tuple[str, str],
) -> None:
    """Checks that two descriptions of a cluster belong to the same job.

    Accepts any description of a single process (`srun -n1`, `mpirun -np 1`): it may have started the launcher whose
    description is used.

    Args:
        used: The description that is used.
        used_variables: The variables it was read from, for the message.
        other: The other description.
        other_variables: The variables of the other description.
        names: The values of `TFDISTKIT_CLUSTER` that select the one and the other.

    Raises:
        ClusterConfigError: if the number of processes or the rank of this one differs; the message shows both.
    """
    # An evaluator is not part of the cluster in TF_CONFIG, but the scheduler counts its process.
    evaluators = int("evaluator" in used_variables.get(env.TF_CONFIG, "") and used.task.role != "evaluator")
    is_same_size = _is_sparse(used) or 0 <= _processes(other) - _processes(used) <= evaluators
    if _processes(other) == 1 or (is_same_size and _same_rank(used, other)):
        return
    raise ClusterConfigError(
        explain(
            f"{used.source} and {other.source} must describe the same job.",
            received=f"{_place(used)} ({_shown(used_variables)}), and {_place(other)} ({_shown(other_variables)})",
            expected="the same number of processes, and the same rank, in both",
            do="Unset the variables of the other job, or select one description: "
            f"{env.CLUSTER}={names[0]} or {env.CLUSTER}={names[1]}.",
        )
    )


def _processes(cluster: ClusterSpec) -> int:
    return cluster.size or max(1, sum(map(len, cluster.addresses.values())))


def _is_sparse(cluster: ClusterSpec) -> bool:
    """Returns whether TF_CONFIG is sparse: then the number of processes is unknown."""
    return cluster.has_addresses and not cluster.is_complete


def _same_rank(used: ClusterSpec, other: ClusterSpec) -> bool:
    """Compares ranks; with servers or an evaluator, roles may be assigned to processes in any order."""
    if used.has_servers or not used.is_training:
        return True
    return used.rank == _number(other)


def _number(cluster: ClusterSpec) -> int:
    """Returns the index of this process among all, counted through the roles in their listed order."""
    number = cluster.task.index
    for role, listed in cluster.addresses.items():
        if role == cluster.task.role:
            break
        number += len(listed)
    return number


def _place(cluster: ClusterSpec) -> str:
    task, among = cluster.task, f"of {_processes(cluster)}"
    return f"process {_number(cluster)} {among}" + (f", {task.role} {task.index}" if cluster.has_servers else "")


def _shown(variables: Mapping[str, str]) -> str:
    short = {
        name: value if len(value) <= _LONGEST_VALUE else value[:_LONGEST_VALUE] + "..."
        for name, value in variables.items()
    }
    return ", ".join(f"{name}={value}" for name, value in short.items())
