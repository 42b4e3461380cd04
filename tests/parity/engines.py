"""Starts the processes of an engine, waits for them with a timeout, and ends all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tfdistkit.cluster import free_ports

# All others are one process.
PROCESSES = {
    **{"multiworker": 2, "multiworker_ring": 2, "multiworker_hierarchical": 3},
    **{"horovod": 2, "horovod_mpi": 2, "stock_multiworker": 2},
}

# How `tfdistkit run` starts an engine of several processes.
_BACKENDS = {
    **{"multiworker": "local", "multiworker_ring": "local", "multiworker_hierarchical": "local"},
    **{"horovod": "horovod", "horovod_mpi": "mpi"},
}

_TESTS = Path(__file__).resolve().parent.parent

# Variables that would make a child part of another job, or verbose.
_REMOVED = ("TF_CONFIG", "TFDISTKIT_RUN_DIR", "TF_XLA_FLAGS", "PYTEST_CURRENT_TEST")


class EngineError(Exception):
    """Raised when processes of an engine fail; the message holds the end of their logs."""


@dataclass
class Job:
    """The processes of an engine.

    Args:
        folder: Where they write, `log.<rank>` included.
    """

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def wait(self, deadline_s: float, check: bool = True) -> list[int | None]:
        """Waits for all processes, and kills those that are left.

        Args:
            deadline_s: Seconds from now.
            check: Whether an exit code other than 0 is an error.

        Returns:
            The exit codes by rank; None for those that the deadline ended.

        Raises:
            EngineError: if a process failed or the deadline passed, and `check` is set.
        """
        end = time.monotonic() + deadline_s
        codes: list[int | None] = []
        try:
            for process in self.processes:
                try:
                    codes.append(process.wait(max(0.0, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    codes.append(None)
        finally:
            self.kill()
        if check and any(codes):
            raise EngineError(f"exit codes {codes}\n{self.logs()}")
        if check and None in codes:
            raise EngineError(f"not done after {deadline_s} s: {codes}\n{self.logs()}")
        return codes

    def kill(self) -> None:
        """Kills the remaining processes and their children."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def logs(self) -> str:
        """Returns the end of the processes' output."""
        files = sorted(self.folder.glob("log.*"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def child_env() -> dict[str, str]:
    """Returns the environment for a test process: one thread, no GPU, no job."""
    env = {name: value for name, value in os.environ.items() if name not in _REMOVED}
    path = [str(_TESTS), str(_TESTS.parent), env.get("PYTHONPATH", "")]
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
    }


def start(folder: Path, arguments: list[str], processes: int = 1, env: dict[str, str] | None = None) -> Job:
    """Starts `python ARGUMENTS` once, or in several processes of one job, by TF_CONFIG.

    Args:
        folder: Where their logs go.
        arguments: What comes after `python`.
        processes: How many.
        env: More variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(folder)
    ports = free_ports(processes) if processes > 1 else []
    for rank in range(processes):
        own_env = {**child_env(), **(env or {})}
        if ports:
            cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
            own_env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        with open(folder / f"log.{rank}", "wb") as log:
            job.processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=own_env,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return job


def start_cases(engine: str, folder: Path, names: list[str], path: str = "") -> Job:
    """Starts an engine on cases of the table; engines of several processes by `tfdistkit run`, as a user would."""
    arguments = ["-m", "parity.run_cases", engine, str(folder), *names]
    if engine in _BACKENDS:
        how = ["--backend", _BACKENDS[engine], "-np", str(PROCESSES[engine])]
        paths = [p for p in (child_env()["PYTHONPATH"], path) if p]
        return start(folder, ["-m", "tfdistkit", "run", *how, *arguments], env={"PYTHONPATH": os.pathsep.join(paths)})
    return start(folder, arguments, PROCESSES.get(engine, 1))
