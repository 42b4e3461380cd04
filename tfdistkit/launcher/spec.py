"""What the user wants (JobSpec), and what is to be started for it (ProcessSpec): plain data."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tfdistkit import env
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.backend import BACKENDS
from tfdistkit.report.crashes import rank_folder


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
        backend: What starts the workers and tells them of each other, one of `launcher.backend.BACKENDS`.
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
    job_id: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        _check_count("np", self.world_size)
        if self.threads_per_worker is not None:
            _check_count("threads_per_worker", self.threads_per_worker)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise OptionError(
                explain("`timeout` is not a time.", received=repr(self.timeout_s), expected="seconds, more than 0")
            )
        for name, value in self.env.items():
            _check_variable(name, value)
        if self.backend not in BACKENDS:
            raise OptionError(
                explain("`backend` is unknown.", received=repr(self.backend), expected=f"one of {', '.join(BACKENDS)}")
            )


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    Args:
        rank: Its number in the job.
        host: The machine to start it on.
        command: The program and its arguments.
        env: The variables to set, over those of the starting process.
        folder: Where its logs and its crash record go.
        passes_stdin: Whether it reads what the starting process would read; otherwise it reads nothing.
    """

    rank: int
    host: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path
    passes_stdin: bool = False

    @property
    def stdout_path(self) -> Path:
        return self.folder / "stdout"

    @property
    def stderr_path(self) -> Path:
        return self.folder / "stderr"


def make_folders(run_dir: Path, world_size: int) -> None:
    """Makes the run folder and one folder per rank, and removes an earlier run's crash records from them.

    Args:
        run_dir: The run folder; it may exist.
        world_size: How many workers there are.

    Raises:
        OptionError: if a folder cannot be made or written to.
    """
    try:
        for rank in range(world_size):
            folder = rank_folder(run_dir, rank)
            folder.mkdir(parents=True, exist_ok=True)
        # Ranks of an earlier, larger run too: nobody must read their errors as this run's.
        for stale in run_dir.glob("rank.*/error.json"):
            stale.unlink()
        (run_dir / ".writable").touch()
        (run_dir / ".writable").unlink()
    except OSError as error:
        raise OptionError(
            explain("The folder for the logs cannot be used.", received=str(error), expected="a folder to write to")
        ) from error


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(explain(f"`{name}` is not a number of them.", received=repr(value), expected="1 or more"))


def _check_variable(name: str, value: object) -> None:
    if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
        raise OptionError(
            explain("`env` holds what cannot be a variable.", received=f"{name}={value!r}", expected="NAME=text")
        )
    if name == env.TF_CONFIG or name in env.LETTERBOX:
        raise OptionError(
            explain(
                "`env` sets a variable that the launcher itself gives to each worker.",
                received=f"{name}={value}",
                expected=f"any variable but {', '.join((env.TF_CONFIG, *env.LETTERBOX))}",
                do="Leave it out; to describe the cluster yourself, start the script without the launcher.",
            )
        )


def temporary_run_dir(temporary: Path) -> Path:
    """Returns the name for a run folder of our own, in the folder for temporary files; nothing is made yet."""
    return temporary / f"tfdistkit-{os.getpid()}-{secrets.token_hex(4)}"
