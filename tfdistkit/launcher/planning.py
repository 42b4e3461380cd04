"""JobSpec -> ProcessSpecs: who runs what, under which variables. Nothing is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from tfdistkit import env
from tfdistkit.cluster.ports import free_ports
from tfdistkit.launcher.rank_variables import HOST, check_variables, default_variables, rank_variables
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.report.crashes import rank_folder

# A collective holds an inter-op thread while it waits for its peers: with a single one, two of them, entered in
# different order, wait for each other for ever.
_FEWEST_INTER_OP_THREADS = 2


def plan_job(job: JobSpec) -> tuple[ProcessSpec, ...]:
    """Plans a job for this machine as it is now: its free ports, its cores, this process's variables."""
    return plan_processes(
        job,
        ports=free_ports(job.world_size),
        cores=available_cores(),
        inherited=env.child_env({}),
        python=sys.executable,
    )


def plan_processes(
    job: JobSpec, *, ports: Sequence[int], cores: int, inherited: Mapping[str, str], python: str
) -> tuple[ProcessSpec, ...]:
    """Decides what is started for a job.

    Args:
        job: What the user wants.
        ports: A free TCP port for each worker.
        cores: How many processor cores the workers share.
        inherited: The variables that the workers will inherit; those that speak of threads are respected.
        python: The interpreter.

    Returns:
        One process per worker, in rank order.

    Raises:
        OptionError: if the user sets a variable that the backend gives to each worker.
    """
    check_variables(job.backend, job.env)
    defaults = {name: value for name, value in default_variables(job.backend).items() if not inherited.get(name)}
    shared = {**_thread_variables(job, cores, inherited), **_output_variables(inherited), **defaults, **job.env}
    return tuple(
        ProcessSpec(
            rank=rank,
            host=HOST,
            command=(python, "-m", "tfdistkit.worker", *job.program),
            env={
                **shared,
                **rank_variables(job.backend, rank, ports),
                env.RANK: str(rank),
                env.LOCAL_RANK: str(rank),
                env.LOCAL_WORLD_SIZE: str(job.world_size),
                env.RUN_DIR: str(job.run_dir),
            },
            folder=rank_folder(job.run_dir, rank),
            passes_stdin=job.passes_stdin and job.world_size == 1,
        )
        for rank in range(job.world_size)
    )


def available_cores() -> int:
    """Returns how many cores this process may use: what `taskset`, SLURM or a container left to it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _thread_variables(job: JobSpec, cores: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The cores shared out. An option beats a variable that is already set, and that beats the share."""
    asked = job.threads_per_worker
    intra = asked or max(1, cores // job.world_size)
    threads = {
        env.INTRA_OP_THREADS: intra,
        env.INTER_OP_THREADS: max(_FEWEST_INTER_OP_THREADS, intra),
        env.OMP_THREADS: intra,
    }
    return {name: str(count) for name, count in threads.items() if asked or not inherited.get(name)}


def _output_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Without this, what a worker prints would come in blocks of 8 KiB, as into any pipe."""
    return {} if env.UNBUFFERED in inherited else {env.UNBUFFERED: "1"}
