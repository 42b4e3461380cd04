"""Two descriptions of a cluster in one environment: the same job, or a mixture of two?"""

from __future__ import annotations

from collections.abc import Mapping

from tfdistkit import env
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, explain

# A value that is longer is shortened in a message.
_LONGEST_VALUE = 200


def require_agreement(
    used: ClusterSpec,
    used_variables: Mapping[str, str],
    other: ClusterSpec,
    other_variables: Mapping[str, str],
    names: tuple[str, str],
) -> None:
    """Checks that two descriptions are of one job.

    One process (`srun -n1`, `mpirun -np 1`) is no job of several: it may have started the launcher whose description
    is used.

    Args:
        used: The description that is used.
        used_variables: What it was read from, for the message.
        other: The other one.
        other_variables: What that was read from.
        names: What `TFDISTKIT_CLUSTER` calls the two.

    Raises:
        ClusterConfigError: if they differ in the number of processes, or in which of them this is; it shows both.
    """
    # An evaluator is no part of the cluster in TF_CONFIG, but a process that somebody started.
    evaluators = int("evaluator" in used_variables.get(env.TF_CONFIG, "") and used.task.role != "evaluator")
    is_same_size = _is_sparse(used) or 0 <= _processes(other) - _processes(used) <= evaluators
    if _processes(other) == 1 or (is_same_size and _same_place(used, other)):
        return
    raise ClusterConfigError(
        explain(
            f"{used.source} and {other.source} tell this process two different things.",
            received=f"{_place(used)} ({_shown(used_variables)}), and {_place(other)} ({_shown(other_variables)})",
            expected="the same number of processes in both, and the same place among them",
            do="Unset the variables that are not of this job, or say which ones count: "
            f"{env.CLUSTER}={names[0]} or {env.CLUSTER}={names[1]}.",
        )
    )


def _processes(cluster: ClusterSpec) -> int:
    return cluster.size or max(1, sum(map(len, cluster.addresses.values())))


def _is_sparse(cluster: ClusterSpec) -> bool:
    """A sparse TF_CONFIG does not tell how many processes there are."""
    return cluster.has_addresses and not cluster.is_complete


def _same_place(used: ClusterSpec, other: ClusterSpec) -> bool:
    """Compares ranks; roles other than of equal workers may be given to the processes in any order."""
    if used.has_servers or not used.is_training:
        return True
    return used.rank == _number(other)


def _number(cluster: ClusterSpec) -> int:
    """Which of all processes this is; roles follow each other in the order in which they are listed."""
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
