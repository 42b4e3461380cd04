"""JobSpec -> ProcessSpecs: the role, command and environment of each process. Starts nothing."""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tfdistkit import env
from tfdistkit.cluster.addresses import join_address
from tfdistkit.cluster.environments import horovod
from tfdistkit.cluster.ports import free_ports
from tfdistkit.cluster.spec import ClusterSpec, TaskSpec
from tfdistkit.launcher import rank_variables
from tfdistkit.launcher.hosts import spread
from tfdistkit.launcher.local.limits import require_room
from tfdistkit.launcher.placement import Place, places_here
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.report.names import ProcessName, attempt_folder

# A collective holds an inter-op thread while it waits for its peers: with a single thread, two collectives that ranks
# enter in different order deadlock.
_FEWEST_INTER_OP_THREADS = 2
# Parameter servers and the coordinator compute little; the cores are for the workers.
_MOST_THREADS_OF_A_SERVER = 4
_SECRET_BYTES = 32


def plan_job(job: JobSpec, attempt: int = 0) -> tuple[ProcessSpec, ...]:
    """Plans a job for this machine, with its free ports, its cores and this process's variables.

    Args:
        job: The job.
        attempt: The number of earlier attempts.

    Returns:
        The processes, as `plan_processes` does.

    Raises:
        OptionError: if the user sets a variable that the backend sets for each worker, or requests more processes
            than this machine can take.
        ClusterConfigError: if there are too few free ports.
    """
    cores = available_cores()
    require_room(len(_tasks(job)), cores)
    places = places_here(free_ports(len(_tasks(job))), cores, env.child_env({}))
    return plan_processes(job, places, python=sys.executable, attempt=attempt)


def plan_processes(job: JobSpec, places: Sequence[Place], *, python: str, attempt: int = 0) -> tuple[ProcessSpec, ...]:
    """Plans the processes of a job.

    Args:
        job: The job.
        places: The placement of each process, in the order of the returned processes.
        python: The interpreter.
        attempt: The number of earlier attempts.

    Returns:
        The workers in rank order; with parameter servers the coordinator, the workers, the servers.

    Raises:
        OptionError: if the user sets a variable that the backend sets for each worker.
    """
    clusters = _clusters(job, places)
    row = row_of(job.backend)
    own = row.variables(clusters[0])
    rank_variables.check_variables(job.backend, job.env, own)
    stall_check = rank_variables.stall_check(job.hang_timeout_s) if horovod.CONTROLLER in own else {}
    workers = Counter(place.address for place, one in zip(places, clusters, strict=True) if one.task.role == "worker")
    secret = secrets.token_hex(_SECRET_BYTES)
    processes = []
    for number, (place, cluster) in enumerate(zip(places, clusters, strict=True)):
        task = cluster.task
        defaults = stall_check | ({} if place.interface is None else row.default_variables(place.interface))
        name = ProcessName(task.index, task.role if job.ps else None)
        folder = attempt_folder(job.run_dir, attempt) / name.folder
        variables = {
            **_output_variables(place.inherited),
            **{variable: value for variable, value in defaults.items() if not place.inherited.get(variable)},
            **_thread_variables(job, task.role, place, workers[place.address]),
            **job.env,
            **row.variables(cluster),
            env.RANK: str(task.index),
            env.LOCAL_RANK: str(cluster.local_rank),
            env.LOCAL_WORLD_SIZE: str(cluster.local_world_size),
            env.RUN_DIR: str(job.run_dir),
            env.TASK_DIR: str(folder),
            env.ATTEMPT: str(attempt),
            env.SECRET: secret,
            **({} if job.elastic is None else {env.ELASTIC: str(job.elastic)}),
        }
        reads = job.passes_stdin and job.world_size == 1 and not job.ps and job.hosts is None
        command = (python, "-m", "tfdistkit.worker", *job.program)
        processes.append(ProcessSpec(name, place.host, command, variables, folder, passes_stdin=reads, number=number))
    return tuple(processes)


def plan_again(spec: ProcessSpec, times: int) -> ProcessSpec:
    """Plans the restart of one process while its peers keep running: at the same address, with a new folder.

    Args:
        spec: The process as it was first started.
        times: The number of this restart of the process, from 1.

    Returns:
        The process to start.
    """
    folder = spec.folder / f"restart.{times}"
    return replace(spec, folder=folder, env={**spec.env, env.TASK_DIR: str(folder)})


def available_cores() -> int:
    """Returns the number of cores that this process may use, as limited by `taskset`, SLURM or a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def hosts_of_tasks(job: JobSpec) -> list[int]:
    """Assigns processes to hosts.

    The workers fill the hosts in order. The coordinator runs on the first host, and the parameter servers are spread
    over the hosts with workers; neither takes a slot.

    Args:
        job: The job, with hosts.

    Returns:
        The host of each process, as an index into `job.hosts.slots`, in the order of `plan_processes`.

    Raises:
        OptionError: if there are too few slots.
    """
    assert job.hosts is not None
    workers = spread(job.hosts.slots, job.world_size)
    used = list(dict.fromkeys(workers))
    if not job.ps:
        return workers
    return [workers[0], *workers, *(used[index % len(used)] for index in range(job.ps))]


def roles_of_tasks(job: JobSpec) -> list[str]:
    """Returns the role of each process, in the order of `plan_processes`.

    Args:
        job: The job.
    """
    return [one.role for one in _tasks(job)]


def _tasks(job: JobSpec) -> list[TaskSpec]:
    """Returns the roles: with parameter servers chief, workers and servers; otherwise workers only."""
    workers = [TaskSpec("worker", index) for index in range(job.world_size)]
    if not job.ps:
        return workers
    return [TaskSpec("chief"), *workers, *(TaskSpec("ps", index) for index in range(job.ps))]


def _clusters(job: JobSpec, places: Sequence[Place]) -> list[ClusterSpec]:
    """Returns the cluster from the view of each process."""
    tasks = _tasks(job)
    listed: dict[str, list[str]] = {}
    for task, place in zip(tasks, places, strict=True):
        listed.setdefault(task.role, []).append(join_address(place.address, place.port))
    addresses = {role: tuple(of_role) for role, of_role in listed.items()}
    local = _local_ranks(tasks, places)
    return [ClusterSpec(addresses, task, *own, source="the launcher") for task, own in zip(tasks, local, strict=True)]


def _local_ranks(tasks: Sequence[TaskSpec], places: Sequence[Place]) -> list[tuple[int, int]]:
    """Returns the local rank and the local world size of each process; (0, 1) for one without a replica."""
    hosts = [place.address if task.role == "worker" else None for task, place in zip(tasks, places, strict=True)]
    sizes, counted = Counter(hosts), Counter[str | None]()
    local = []
    for host in hosts:
        local.append((0, 1) if host is None else (counted[host], sizes[host]))
        counted[host] += 1
    return local


def _thread_variables(job: JobSpec, role: str, place: Place, workers_on_host: int) -> dict[str, str]:
    """Returns thread counts: the option, else a variable inherited on the host, else an equal share of its cores."""
    asked = job.threads_per_worker
    intra = asked or max(1, place.cores // max(1, workers_on_host))
    if role != "worker":
        intra = min(intra, _MOST_THREADS_OF_A_SERVER)
    threads = {
        env.INTRA_OP_THREADS: intra,
        env.INTER_OP_THREADS: max(_FEWEST_INTER_OP_THREADS, intra),
        env.OMP_THREADS: intra,
    }
    return {name: str(count) for name, count in threads.items() if asked or not place.inherited.get(name)}


def _output_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Unbuffers the workers' output: Python writes to a pipe in blocks of 8 KiB."""
    return {} if env.UNBUFFERED in inherited else {env.UNBUFFERED: "1"}
