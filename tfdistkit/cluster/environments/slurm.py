"""Reads the cluster of a step from the variables that SLURM's `srun` sets for each task.

Only the tasks of a step (`srun`) form a cluster. A batch script, or a shell of `salloc`, is a single process in a job,
although SLURM_PROCID and SLURM_NTASKS are set.
https://slurm.schedmd.com/srun.html, "Output environment variables".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdistkit import env
from tfdistkit.cluster.addresses import join_address
from tfdistkit.cluster.environments import slurm_layout
from tfdistkit.cluster.environments.slurm_notation import expand_counts, expand_hosts
from tfdistkit.cluster.environments.slurm_ports import first_port
from tfdistkit.cluster.spec import ClusterSpec, TaskSpec, local_place
from tfdistkit.errors import ClusterConfigError, explain

SOURCE = "SLURM's variables"

_JOB = "SLURM_JOB_ID"
_STEP = "SLURM_STEP_ID"
_RANK = "SLURM_PROCID"
_SIZE = "SLURM_STEP_NUM_TASKS"
_LOCAL = "SLURM_LOCALID"
_NODE = "SLURM_NODEID"
_NODES = "SLURM_STEP_NODELIST"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
# Only set where `srun -m` or `sbatch -m` was given: `cyclic`, `block:cyclic`, `plane`, ...
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_PLANE_SIZE = "SLURM_DIST_PLANESIZE"
_ARBITRARY = "SLURM_ARBITRARY_NODELIST"
_RANKS_HERE = "SLURM_GTIDS"
_NODE_NAME = "SLURMD_NODENAME"
_COMPONENTS = "SLURM_HET_SIZE"
_GPUS_HERE = "SLURM_GPUS_ON_NODE"

# The variables that are read, in the order for display.
VARIABLES = (_JOB, _STEP, _RANK, _SIZE, _NODES, _COUNTS, _DISTRIBUTION, _PLANE_SIZE, _ARBITRARY, _LOCAL, _NODE,
             _RANKS_HERE, _NODE_NAME, _COMPONENTS, env.PS, env.PORT)  # fmt: skip
# Absent from batch scripts and from the shells of `salloc`.
_IN_STEPS_ONLY = (_STEP, _NODES, _COUNTS, _SIZE)


@dataclass(frozen=True)
class _Step:
    """Holds the parsed variables of one task."""

    job: int
    number: int
    rank: int
    size: int
    local_rank: int
    node: int
    nodes: tuple[str, ...]
    counts: tuple[int, ...]


def read_slurm() -> ClusterSpec | None:
    """Returns the cluster of a SLURM step, with addresses, or None outside of a step.

    All tasks are workers. With `TFDISTKIT_PS=N` the first task is the chief (the coordinator), the last N tasks are
    parameter servers, and the remaining ones are workers.

    Raises:
        ClusterConfigError: if variables are missing or contradict each other.
    """
    if not any(env.text(name) for name in _IN_STEPS_ONLY):
        return None
    step = _read_step()
    hosts = _hosts_of_tasks(step)
    _check_own_place(step, hosts)
    places = slurm_layout.local_places(hosts)
    port = first_port(step.job, step.number, max(places) + 1)
    tasks = [join_address(host, port + place) for host, place in zip(hosts, places, strict=True)]
    addresses = _roles(tasks)
    task = _task(addresses, step.rank)
    local_rank, local_world_size = local_place(addresses, task)
    return ClusterSpec(addresses, task, local_rank, local_world_size, SOURCE)


def in_job_without_step() -> str | None:
    """Returns the id of the SLURM job of this process if it is outside of the job's steps, else None."""
    return None if any(env.text(name) for name in _IN_STEPS_ONLY) else env.text(_JOB)


def gpus_of_step_here() -> int | None:
    """Returns the number of GPUs of this step on this node; None outside of steps, or without GPUs."""
    return env.integer(_GPUS_HERE) if is_step() else None


def is_step() -> bool:
    """Returns whether `srun` started this process or one of its ancestors."""
    return env.text(_STEP) is not None


def _read_step() -> _Step:
    numbers = {name: env.integer(name) for name in (_JOB, _STEP, _RANK, _SIZE, _LOCAL, _NODE)}
    texts = {name: env.text(name) for name in (_NODES, _COUNTS)}
    found = {**numbers, **texts}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        known = ", ".join(f"{name}={value}" for name, value in found.items() if value is not None)
        raise ClusterConfigError(
            explain(
                "SLURM's variables must be complete.",
                received=f"{known}, but no {' and no '.join(missing)}",
                expected="all variables that srun sets for a task",
                do="Start the script directly with srun, and keep its environment; "
                f"for a single process, set {env.CLUSTER}=single.",
            )
        )
    job, number, rank, size, local_rank, node = (value or 0 for value in numbers.values())
    nodes = expand_hosts(texts[_NODES] or "", _NODES)
    step = _Step(job, number, rank, size, local_rank, node, nodes, expand_counts(texts[_COUNTS] or "", _COUNTS))
    _check_numbers(step)
    return step


def _check_numbers(step: _Step) -> None:
    nodes = f"the {len(step.nodes)} nodes in `{_NODES}`={env.text(_NODES)}"
    checks = (
        (_SIZE, step.size, step.size >= 1, "be >= 1"),
        (_RANK, step.rank, 0 <= step.rank < step.size, f"be >= 0 and below `{_SIZE}`={step.size}"),
        (_COUNTS, env.text(_COUNTS), len(step.counts) == len(step.nodes), f"have a number for each of {nodes}"),
        (_COUNTS, env.text(_COUNTS), sum(step.counts) == step.size, f"add up to `{_SIZE}`={step.size}"),
    )
    for name, value, is_valid, rule in checks:
        if not is_valid:
            what = f"`{name}` must {rule}."
            raise ClusterConfigError(explain(what, received=f"{name}={value}", do=_FOREIGN))


def _hosts_of_tasks(step: _Step) -> tuple[str, ...]:
    """Returns the host of each task in rank order; all tasks of the step compute the same."""
    distribution = env.text(_DISTRIBUTION) or "block"
    # After a colon: the distribution over the sockets of a node. After a comma: `pack`, `nopack`.
    kind = distribution.replace(",", ":").split(":")[0].lower()
    kind, _, size = kind.partition("=")
    if kind == "arbitrary":
        return _arbitrary_hosts(step)
    if kind in ("block", "*", "unknown"):
        nodes = slurm_layout.block(step.counts)
    elif kind == "cyclic":
        nodes = slurm_layout.plane(step.counts, 1)
    elif kind == "plane":
        nodes = slurm_layout.plane(step.counts, _plane_size(size))
    else:
        what = f"`{_DISTRIBUTION}` must be block, cyclic, plane or arbitrary."
        raise ClusterConfigError(explain(what, received=f"{_DISTRIBUTION}={distribution}"))
    return tuple(step.nodes[node] for node in nodes)


def _plane_size(text: str) -> int:
    size = int(text) if text.isascii() and text.isdigit() else env.integer(_PLANE_SIZE)
    if size is None or size < 1:
        raise ClusterConfigError(
            explain(
                f"`{_PLANE_SIZE}` must be an integer >= 1, as `{_DISTRIBUTION}` is `plane`.",
                received=f"{_PLANE_SIZE}={size}",
                do="Start the step with `srun -m plane=SIZE`.",
            )
        )
    return size


def _arbitrary_hosts(step: _Step) -> tuple[str, ...]:
    """Returns the host of each task as the user listed them: SLURM's own list of the step's nodes is sorted."""
    listed = env.text(_ARBITRARY)
    hosts = expand_hosts(listed, _ARBITRARY) if listed else ()
    if len(hosts) != step.size:
        raise ClusterConfigError(
            explain(
                f"`{_ARBITRARY}` must list the node of each task, as the distribution is `arbitrary`.",
                received=f"{_ARBITRARY}={listed}: {len(hosts)} nodes, for {step.size} tasks",
                expected="one node for each task, in the order of the tasks",
                do=f"Run before srun: export {_ARBITRARY}=$(paste -sd, $SLURM_HOSTFILE)",
            )
        )
    return hosts


def _check_own_place(step: _Step, hosts: Sequence[str]) -> None:
    """Checks the computed host of this task against SLURM's own variables.

    If it is right in every task, the hosts of all tasks are right. In a heterogeneous step SLURM sorts the nodes of
    all components into one list, so only the name of the node is comparable: `SLURM_NODEID` is not an index into that
    list, and `SLURM_LOCALID` differs if components share a node.
    """
    host = hosts[step.rank]
    checks: list[tuple[str, object, object]] = [(_NODE_NAME, env.text(_NODE_NAME) or host, host)]
    if env.text(_COMPONENTS) is None:
        own_node = step.nodes[step.node] if 0 <= step.node < len(step.nodes) else None
        ranks_here = ",".join(str(rank) for rank, other in enumerate(hosts) if other == host)
        checks += [
            (f"{_NODE}={step.node}, the node", own_node, host),
            (_LOCAL, step.local_rank, slurm_layout.local_places(hosts)[step.rank]),
            (_RANKS_HERE, env.text(_RANKS_HERE) or ranks_here, ranks_here),
        ]
    for name, received, computed in checks:
        if received != computed:
            raise _layout_error(step, f"{name} {received}", f"{name} {computed}")


def _layout_error(step: _Step, received: str, computed: str) -> ClusterConfigError:
    names = (_SIZE, _NODES, _COUNTS, _DISTRIBUTION, _PLANE_SIZE, _ARBITRARY, _COMPONENTS)
    listed = ", ".join(f"{name}={value}" for name in names if (value := env.text(name)) is not None)
    if env.text(_COMPONENTS) is not None:
        do = (
            "Order the components of this heterogeneous job by the names of their nodes, with `-m block` (SLURM sorts "
            "the nodes into one list), or start one component with srun."
        )
    elif env.text("SLURM_OVERCOMMIT") is not None:
        do = "Start the step with `-m block`: on overcommitted nodes (`srun -O`) SLURM places tasks differently."
    else:
        do = _FOREIGN
    return ClusterConfigError(
        explain(
            "SLURM's variables contradict each other on the node of this task.",
            received=f"{_RANK}={step.rank} with {received}",
            expected=f"{computed}, after {listed}",
            do=do,
        )
    )


_FOREIGN = (
    "If they come from a step that submitted this job, submit it without them (`sbatch --export=NONE`); "
    f"for a single process, set {env.CLUSTER}=single."
)


def _roles(tasks: list[str]) -> dict[str, tuple[str, ...]]:
    servers = env.integer(env.PS) or 0
    if servers == 0:
        return {"worker": tuple(tasks)}
    # One task is the coordinator, and at least one a worker.
    most = len(tasks) - 2
    if not 1 <= servers <= most:
        raise ClusterConfigError(
            explain(
                f"`{env.PS}` must leave a task for the coordinator and one for a worker.",
                received=f"{env.PS}={servers}, {_SIZE}={len(tasks)}",
                expected=f"0 to {most} parameter servers"
                if most > 0
                else "3 tasks or more: a coordinator, a worker and a parameter server",
                do=f"Start more tasks (`srun -n {max(servers, 1) + 2}`), or unset {env.PS}.",
            )
        )
    return {"chief": (tasks[0],), "worker": tuple(tasks[1:-servers]), "ps": tuple(tasks[-servers:])}


def _task(addresses: dict[str, tuple[str, ...]], rank: int) -> TaskSpec:
    """Returns the role of a task: its rank counts through the roles in their order."""
    for role, listed in addresses.items():
        if rank < len(listed):
            return TaskSpec(role, rank)
        rank -= len(listed)
    raise AssertionError(f"task {rank} beyond the last")
