"""What the user wants (JobSpec), as plain data, and the run folder of a job."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdistkit import env
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.process_spec import ProcessSpec as ProcessSpec
from tfdistkit.launcher.registry import names_with, row_of
from tfdistkit.report.alone import FILE_NAME as ALONE_FILE
from tfdistkit.report.crashes import FILE_NAME as CRASH_FILE
from tfdistkit.report.private_files import make_folder
from tfdistkit.report.progress import FILE_NAME as STEPS_FILE

# The folders of processes in a run folder, of earlier runs too.
_TASK_FOLDERS = ("rank.*", "chief.*", "worker.*", "ps.*", "worker.*/restart.*")


@dataclass(frozen=True)
class JobSpec:
    """A job as the user asked for it.

    Args:
        world_size: How many workers.
        program: What each worker runs: `(script, *args)` or `("-m", module, *args)`.
        run_dir: Where logs, events and crash records go.
        env: Variables for the workers, over those of this process.
        threads_per_worker: Threads for one TensorFlow operation; None shares the cores out.
        timeout_s: How long the whole job may take; None for as long as it takes.
        passes_stdin: Whether a single worker reads what this process would read.
        backend: What starts the workers and tells them of each other, one of `launcher.registry.names()`.
        ps: How many parameter servers. With any, there is a coordinator besides, and the workers take orders.
        max_restarts: How often processes may be started again after a failure.
        hosts: The hosts to start it on, by ssh; None for this machine.
        mpi_args: More options for mpirun, with the backend that calls it.
        job_id: The job's own mark, carried by all of its processes.
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
    job_id: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def size(self) -> int:
        """How many processes there are, with a coordinator and servers if it has them."""
        return self.world_size + (1 + self.ps if self.ps else 0)

    def __post_init__(self) -> None:
        _check_count("np", self.world_size)
        if self.threads_per_worker is not None:
            _check_count("threads_per_worker", self.threads_per_worker)
        _check_count("ps", self.ps, least=0)
        _check_count("max_restarts", self.max_restarts, least=0)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise OptionError(
                explain("`timeout` is not a time.", received=repr(self.timeout_s), expected="seconds, more than 0")
            )
        for name, value in self.env.items():
            _check_variable(name, value)
        row = row_of(self.backend)
        if self.ps and not row.has_roles:
            raise OptionError(
                explain(
                    f"The backend {self.backend!r} has no parameter servers: its processes are all alike.",
                    received=f"ps={self.ps}, backend={self.backend!r}",
                    expected=f"`ps` with one of the backends: {', '.join(names_with('has_roles'))}",
                    do="Leave out one of the two.",
                )
            )
        if self.mpi_args and not row.takes_mpi_args:
            what = "`mpi_args` are options of mpirun, which only the backend 'mpi' calls."
            raise OptionError(explain(what, received=f"backend={self.backend!r}", do="Leave out one of the two."))
        if self.hosts is not None and row.on_hosts is None:
            raise OptionError(
                explain(
                    f"The backend {self.backend!r} knows one machine only.",
                    received=f"hosts {', '.join(one.host for one in self.hosts.slots)}, backend={self.backend!r}",
                    expected=f"hosts with one of the backends: {', '.join(names_with('on_hosts'))}",
                )
            )


def make_folders(run_dir: Path, processes: Sequence[ProcessSpec]) -> None:
    """Makes the run folder and that of each process, and removes the crash records of an earlier run.

    Args:
        run_dir: The run folder; it may exist.
        processes: Those that start first.

    Raises:
        OptionError: if a folder cannot be made or written to.
    """
    try:
        for process in processes:
            make_folder(process.folder)
        # Those of an earlier, larger run too: nobody must read their errors as this run's.
        for name in (CRASH_FILE, ALONE_FILE, STEPS_FILE):
            for stale in left_in(run_dir, name):
                stale.unlink()
        (run_dir / ".writable").touch()
        (run_dir / ".writable").unlink()
    except OSError as error:
        raise OptionError(
            explain("The folder for the logs cannot be used.", received=str(error), expected="a folder to write to")
        ) from error


def left_in(run_dir: Path, file_name: str) -> list[Path]:
    """Returns the files of one name that processes left in a run folder, in all attempts.

    Args:
        run_dir: The run folder.
        file_name: The file's name.
    """
    attempts = (run_dir, *run_dir.glob("attempt.*"))
    return [path for one in attempts for folder in _TASK_FOLDERS for path in one.glob(f"{folder}/{file_name}")]


def _check_count(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        what = f"`{name}` is not a number of them."
        raise OptionError(explain(what, received=repr(value), expected=f"{least} or more"))


def _check_variable(name: str, value: object) -> None:
    if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
        raise OptionError(
            # Not a text: that may be a secret.
            explain(
                "`env` holds what cannot be a variable.",
                received=f"{name}={'...' if isinstance(value, str) else repr(value)}",
                expected="NAME=text",
            )
        )
    if name == env.TF_CONFIG or name in env.LETTERBOX:
        raise OptionError(
            explain(
                "`env` sets a variable that the launcher itself gives to each worker.",
                received=f"{name}=...",
                expected=f"any variable but {', '.join((env.TF_CONFIG, *env.LETTERBOX))}",
                do="Leave it out; to describe the cluster yourself, start the script without the launcher.",
            )
        )


def temporary_run_dir(temporary: Path) -> Path:
    """Returns the name for a run folder of our own, in the folder for temporary files; nothing is made yet."""
    return temporary / f"tfdistkit-{os.getpid()}-{secrets.token_hex(4)}"
