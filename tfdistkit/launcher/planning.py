"""JobSpec -> ProcessSpecs: who has which role, and runs what, under which variables. Nothing is started here."""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tfdistkit import env
from tfdistkit.cluster.addresses import join_address
from tfdistkit.cluster.ports import free_ports
from tfdistkit.cluster.spec import ClusterSpec, TaskSpec
from tfdistkit.launcher.hosts import spread
from tfdistkit.launcher.local.limits import require_room
from tfdistkit.launcher.placement import Place, places_here
from tfdistkit.launcher.rank_variables import check_variables
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.report.names import ProcessName, attempt_folder

# A collective holds an inter-op thread while it waits for its peers: with a single one, two of them, entered in
# different order, wait for each other for ever.
_FEWEST_INTER_OP_THREADS = 2
# A parameter server and the coordinator compute little: what is theirs is missing to the workers.
_MOST_THREADS_OF_A_SERVER = 4
_SECRET_BYTES = 32


def plan_job(job: JobSpec, attempt: int = 0) -> tuple[ProcessSpec, ...]:
    """Plans a job for this machine as it is now: its free ports, its cores, this process's variables.

    Args:
        job: What the user wants.
        attempt: How often the job was started again before.

    Returns:
        As `plan_processes`.

    Raises:
        OptionError: if the user sets a variable that the backend gives to each worker, or wants more processes than
            this machine can take.
        ClusterConfigError: if there are too few free ports.
    """
    cores = available_cores()
    require_room(len(_tasks(job)), cores)
    places = places_here(free_ports(len(_tasks(job))), cores, env.child_env({}))
    return plan_processes(job, places, python=sys.executable, attempt=attempt)


def plan_processes(job: JobSpec, places: Sequence[Place], *, python: str, attempt: int = 0) -> tuple[ProcessSpec, ...]:
    """Decides what is started for a job.

    Args:
        job: What the user wants.
        places: Where each process runs, in the order of what is returned.
        python: The interpreter.
        attempt: How often the job was started again before.

    Returns:
        The workers in rank order; with parameter servers the coordinator, the workers, the servers.

    Raises:
        OptionError: if the user sets a variable that the backend gives to each worker.
    """
    clusters = _clusters(job, places)
    row = row_of(job.backend)
    check_variables(job.backend, job.env, row.variables(clusters[0]))
    workers = Counter(place.address for place, one in zip(places, clusters, strict=True) if one.task.role == "worker")
    secret = secrets.token_hex(_SECRET_BYTES)
    processes = []
    for number, (place, cluster) in enumerate(zip(places, clusters, strict=True)):
        task = cluster.task
        defaults = {} if place.interface is None else row.default_variables(place.interface)
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
        }
        reads = job.passes_stdin and job.world_size == 1 and not job.ps and job.hosts is None
        command = (python, "-m", "tfdistkit.worker", *job.program)
        processes.append(ProcessSpec(name, place.host, command, variables, folder, passes_stdin=reads, number=number))
    return tuple(processes)


def plan_again(spec: ProcessSpec, times: int) -> ProcessSpec:
    """Plans the restart of one process while the others go on: at its address, as all is the same but the folder.

    Args:
        spec: What was started at first.
        times: Which restart of this process it is, from 1.

    Returns:
        What to start now.
    """
    folder = spec.folder / f"restart.{times}"
    return replace(spec, folder=folder, env={**spec.env, env.TASK_DIR: str(folder)})


def available_cores() -> int:
    """Returns how many cores this process may use: what `taskset`, SLURM or a container left to it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def hosts_of_tasks(job: JobSpec) -> list[int]:
    """Decides which host each process runs on.

    The workers fill the hosts one after the other. The coordinator is on the first one, and the parameter servers are
    spread over those with workers: neither takes a slot.

    Args:
        job: What the user wants, with hosts.

    Returns:
        The host of each process, by its place in `job.hosts.slots`, in the order of `plan_processes`.

    Raises:
        OptionError: if there are too few slots.
    """
    assert job.hosts is not None
    workers = spread(job.hosts.slots, job.world_size)
    used = list(dict.fromkeys(workers))
    if not job.ps:
        return workers
    return [workers[0], *workers, *(used[index % len(used)] for index in range(job.ps))]


def _tasks(job: JobSpec) -> list[TaskSpec]:
    """The roles: with parameter servers there is a coordinator besides the workers; otherwise all are alike."""
    workers = [TaskSpec("worker", index) for index in range(job.world_size)]
    if not job.ps:
        return workers
    return [TaskSpec("chief"), *workers, *(TaskSpec("ps", index) for index in range(job.ps))]


def _clusters(job: JobSpec, places: Sequence[Place]) -> list[ClusterSpec]:
    """The cluster as each process sees it."""
    tasks = _tasks(job)
    listed: dict[str, list[str]] = {}
    for task, place in zip(tasks, places, strict=True):
        listed.setdefault(task.role, []).append(join_address(place.address, place.port))
    addresses = {role: tuple(of_role) for role, of_role in listed.items()}
    local = _local_places(tasks, places)
    return [ClusterSpec(addresses, task, *own, source="the launcher") for task, own in zip(tasks, local, strict=True)]


def _local_places(tasks: Sequence[TaskSpec], places: Sequence[Place]) -> list[tuple[int, int]]:
    """The local rank and the local world size of each process; (0, 1) for one without a replica."""
    hosts = [place.address if task.role == "worker" else None for task, place in zip(tasks, places, strict=True)]
    sizes, seen = Counter(hosts), Counter[str | None]()
    local = []
    for host in hosts:
        local.append((0, 1) if host is None else (seen[host], sizes[host]))
        seen[host] += 1
    return local


def _thread_variables(job: JobSpec, role: str, place: Place, neighbours: int) -> dict[str, str]:
    """The cores of a host shared out. An option beats a variable that is set there, and that beats the share."""
    asked = job.threads_per_worker
    intra = asked or max(1, place.cores // max(1, neighbours))
    if role != "worker":
        intra = min(intra, _MOST_THREADS_OF_A_SERVER)
    threads = {
        env.INTRA_OP_THREADS: intra,
        env.INTER_OP_THREADS: max(_FEWEST_INTER_OP_THREADS, intra),
        env.OMP_THREADS: intra,
    }
    return {name: str(count) for name, count in threads.items() if asked or not place.inherited.get(name)}


def _output_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Without this, what a worker prints would come in blocks of 8 KiB, as into any pipe."""
    return {} if env.UNBUFFERED in inherited else {env.UNBUFFERED: "1"}
