"""The job that the user requests (JobSpec), as plain data, and its run folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdistkit import env
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.elasticity import ElasticSpec, PreemptionSpec, check_elastic
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.process_spec import ProcessSpec as ProcessSpec
from tfdistkit.launcher.registry import names_with, row_of
from tfdistkit.report.alone import FILE_NAME as ALONE_FILE
from tfdistkit.report.crashes import FILE_NAME as CRASH_FILE
from tfdistkit.report.hangs.layout import FILE_NAME as NOTES_FILE
from tfdistkit.report.hangs.mirror import FILE_NAME as MIRROR_FILE
from tfdistkit.report.hangs.stacks import FILE_NAME as STACKS_FILE
from tfdistkit.report.private_files import make_folder, writing_logs
from tfdistkit.report.progress import FILE_NAME as STEPS_FILE
from tfdistkit.validation import require_integer, require_positive

# Folders of processes in a run folder, including those of earlier runs.
_TASK_FOLDERS = ("rank.*", "chief.*", "worker.*", "ps.*", "worker.*/restart.*")

# The default of the hang timeout, in seconds: that of NCCL's watchdog in PyTorch.
HANG_TIMEOUT_S = 600.0
_SHORTEST_ELSEWHERE_S = 5.0


@dataclass(frozen=True)
class JobSpec:
    """A job as the user requested it.

    Args:
        world_size: The number of workers.
        program: The command of each worker: `(script, *args)` or `("-m", module, *args)`.
        run_dir: The folder for logs, events and crash records.
        env: Variables for the workers; they override those of this process.
        threads_per_worker: Threads per TensorFlow operation; None divides the cores among the workers.
        timeout_s: Time limit of the whole job, in seconds; None for no limit.
        passes_stdin: Whether a single worker inherits the stdin of this process.
        backend: The backend that starts the workers, one of `launcher.registry.names()`.
        ps: The number of parameter servers. If positive, the job also has a coordinator.
        max_restarts: The number of restarts allowed after failures.
        hosts: The hosts to start it on over ssh; None for this machine.
        restart_window_s: The seconds after which a restart no longer counts against `max_restarts`; None for never.
        elastic: The bounds of the number of workers; None for a fixed number.
        preemption: How preemption is announced; None without notices.
        mpi_args: Extra options for mpirun, for the backend that calls it.
        backend_options: What the options of the backend say, for one of another package (`BackendRow.options`).
        hang_timeout_s: Time after which a job whose ranks make no progress is stopped, in seconds; None for no limit.
            Not for backends whose workers on other hosts are not seen (`watches_hosts`), nor for SLURM.
        job_id: The job's mark, in the environment of all of its processes.
    """

    world_size: int
    program: tuple[str, ...]
    run_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    threads_per_worker: int | None = None
    timeout_s: float | None = None
    passes_stdin: bool = False
    backend: str = "local"
    ps: int = 0
    max_restarts: int = 0
    hosts: HostsSpec | None = None
    mpi_args: tuple[str, ...] = ()
    backend_options: Any = None
    restart_window_s: float | None = None
    elastic: ElasticSpec | None = None
    preemption: PreemptionSpec | None = None
    hang_timeout_s: float | None = None
    job_id: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def size(self) -> int:
        """The number of processes, including a coordinator and parameter servers."""
        return self.world_size + (1 + self.ps if self.ps else 0)

    def __post_init__(self) -> None:
        row_of(self.backend).require_start(self.backend, has_hosts=self.hosts is not None)
        require_integer("np", self.world_size)
        if self.threads_per_worker is not None:
            require_integer("threads_per_worker", self.threads_per_worker)
        require_integer("ps", self.ps, at_least=0)
        require_integer("max_restarts", self.max_restarts, at_least=0)
        if self.timeout_s is not None:
            require_positive("timeout", self.timeout_s, "seconds")
        if self.restart_window_s is not None:
            require_positive("restart_window", self.restart_window_s, "seconds")
        if self.hang_timeout_s is not None:
            require_positive("hang_timeout", self.hang_timeout_s, "seconds")
            _require_seen(self, self.hang_timeout_s)
        for name, value in self.env.items():
            _check_variable(name, value)
        row = row_of(self.backend)
        if self.elastic is not None:
            check_elastic(self.elastic, self.backend, self.ps)
        if self.ps and not row.has_roles:
            raise OptionError(
                explain(
                    f"`ps` must be 0 with the backend {self.backend!r}, which has no parameter servers.",
                    received=f"ps={self.ps}, backend={self.backend!r}",
                    do=f"Leave out `ps`, or use one of the backends: {', '.join(names_with('has_roles'))}.",
                )
            )
        if self.mpi_args and not row.takes_mpi_args:
            what = "`mpi_args` must be used with the backend 'mpi', the only one that calls mpirun."
            raise OptionError(explain(what, received=f"backend={self.backend!r}", do="Leave out one of the two."))
        if self.hosts is not None and row.on_hosts is None:
            raise OptionError(
                explain(
                    f"The backend {self.backend!r} must be used without hosts: it runs on one machine.",
                    received=f"hosts {self.hosts.where}, backend={self.backend!r}",
                    do=f"Leave out the hosts, or use one of the backends: {', '.join(names_with('on_hosts'))}.",
                )
            )


def _require_seen(job: JobSpec, hang_timeout_s: float) -> None:
    """Raises an error if the launcher does not see the progress of the ranks, or not often enough."""
    row = row_of(job.backend)
    is_discovered = job.elastic is not None and job.elastic.discovery is not None
    is_elsewhere = job.hosts is not None or is_discovered
    hosts = "" if job.hosts is None else f", hosts: {job.hosts.where}"
    hosts += ", hosts of a discovery script" if is_discovered else ""
    if row.is_submitted or (is_elsewhere and not row.watches_hosts):
        raise OptionError(
            explain(
                "`hang_timeout` must be used where the launcher sees the progress of the ranks: on this machine, or on "
                "hosts over ssh or Ray.",
                received=f"backend={job.backend!r}{hosts}",
                do="Leave it out. The timeout of the collectives, `timeout_s` of the strategy, is there, too.",
            )
        )
    if is_elsewhere and hang_timeout_s < _SHORTEST_ELSEWHERE_S:
        what = (
            f"`hang_timeout` must be at least {_SHORTEST_ELSEWHERE_S:g} seconds for ranks on other hosts, which tell "
        )
        raise OptionError(explain(f"{what}their progress once a second.", received=f"{hang_timeout_s:g}{hosts}"))


def make_folders(run_dir: Path, processes: Sequence[ProcessSpec]) -> None:
    """Creates the run folder and the folder of each process, and removes the crash records of an earlier run.

    Args:
        run_dir: The run folder; it may exist.
        processes: The processes of the first attempt.

    Raises:
        OptionError: if a folder cannot be created or written to.
    """
    with writing_logs():
        for process in processes:
            make_folder(process.folder)
        # Also those of an earlier, larger run: its errors must not be reported as this run's.
        for name in (CRASH_FILE, ALONE_FILE, STEPS_FILE, NOTES_FILE, STACKS_FILE, MIRROR_FILE):
            for stale in left_in(run_dir, name):
                stale.unlink()
        (run_dir / ".writable").touch()
        (run_dir / ".writable").unlink()


def left_in(run_dir: Path, file_name: str) -> list[Path]:
    """Returns the files with one name that processes wrote to a run folder, in all attempts.

    Args:
        run_dir: The run folder.
        file_name: The file's name.
    """
    attempts = (run_dir, *run_dir.glob("attempt.*"))
    return [path for one in attempts for folder in _TASK_FOLDERS for path in one.glob(f"{folder}/{file_name}")]


def _check_variable(name: str, value: object) -> None:
    if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
        raise OptionError(
            # A string value is not shown: it may be a secret.
            explain(
                "`env` must map variable names to strings.",
                received=f"{name}={'...' if isinstance(value, str) else repr(value)}",
            )
        )
    if name == env.TF_CONFIG or name in env.LETTERBOX:
        raise OptionError(
            explain(
                "`env` must not set the variables that the launcher sets for each worker: "
                f"{', '.join((env.TF_CONFIG, *env.LETTERBOX))}.",
                received=f"{name}=...",
                do="Leave it out. To describe the cluster yourself, start the script without the launcher.",
            )
        )


def temporary_run_dir(temporary: Path) -> Path:
    """Returns a new name for a run folder below a folder for temporary files; it creates nothing."""
    return temporary / f"tfdistkit-{os.getpid()}-{secrets.token_hex(4)}"
