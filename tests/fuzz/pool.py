"""The processes of an engine, kept for many programs: each starts once, and answers one program after the other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil
from parity import engines

from fuzz.programs import Program
from tfdistkit.cluster import free_ports

# A program takes a second or two on a free core, minutes on a busy machine: the CPU time tells hung processes from
# slow ones.
DEADLINE_S = 600.0
_STILL_S = 45.0
_STILL_CPU_S = 0.5
START_S = 300.0
# Timeout, in seconds, for a rank after another one has failed.
_GRACE_S = 60.0
# Programs after which processes are restarted: compiled functions accumulate in TensorFlow.
_LIFETIME = 400

# Processes of each engine that answer; the others serve them.
RANKS = {"multiworker": 2, "multiworker_ring": 2, "multiworker_hierarchical": 3, "horovod": 2}
# Engines with roles: workers and servers, and whether they train exactly.
ROLES = {"parameter_server": (2, 1), "parameter_server:one": (1, 1)}


@dataclass(frozen=True)
class Outcome:
    """The answer of one rank.

    Args:
        values: Logs by act and name.
        arrays: Weights, state of optimizers, predictions.
        error: The error that ended the program: type, ours, message, traceback.
        seconds: How much CPU time it took.
    """

    values: dict[str, Any]
    arrays: dict[str, Any]
    error: dict[str, Any] | None
    seconds: float


class Pool:
    """The processes of one engine.

    Args:
        engine: "plain", or the name of a strategy.
        fault: A fault that is planted in the processes; "" for none.
        horovod: A folder for PYTHONPATH with Horovod in it.
    """

    def __init__(self, engine: str, fault: str = "", horovod: str = ""):
        self.engine, self._fault, self._horovod = engine, fault, horovod
        self._folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{engine.replace(':', '-')}-"))
        self._job: engines.Job | None = None
        self._connections: list[Connection] = []
        self._runs = self._since_start = 0
        self.restarts = 0
        # Whether an error may have left state behind: a failure must then be reproduced in fresh processes.
        self.is_suspect = False

    @property
    def ranks(self) -> int:
        """The number of processes that answer."""
        return RANKS.get(self.engine, 1)

    def start(self) -> None:
        """Starts the processes if they are not running."""
        if self._job is not None:
            return
        address = str(self._folder / f"socket{self._runs}")
        with Listener(address, "AF_UNIX", backlog=8) as listener:
            self._job = self._start_processes(address)
            try:
                accepted = [self._accept(listener) for _ in range(self.ranks)]
                found = {connection.recv(): connection for connection in accepted}
            except (EOFError, OSError):
                logs = self._job.logs()
                self.close_processes()
                raise engines.EngineError(f"{self.engine} did not start\n{logs}") from None
        self._connections = [found[rank] for rank in sorted(found)]
        self._since_start = 0

    def _accept(self, listener: Listener) -> Connection:
        """Waits until a process is ready; fails if it has ended."""
        socket = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(1.0)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return listener.accept()
            if self._job is not None and any(process.poll() is not None for process in self._job.processes):
                raise EOFError
        raise EOFError

    def _start_processes(self, address: str) -> engines.Job:
        folder = self._folder / f"logs{self._runs}"
        words = ["-m", "fuzz.worker", self.engine, address, *([self._fault] if self._fault else [])]
        if self.engine in ROLES:
            return _start_roles(folder, words, *ROLES[self.engine])
        paths = os.pathsep.join(p for p in (engines.child_env()["PYTHONPATH"], self._horovod) if p)
        return engines.start(folder, words, self.ranks, env={"PYTHONPATH": paths})

    @property
    def trains(self) -> bool:
        """Whether training is exact here; with several workers of parameter_server it is not."""
        return self.engine != "parameter_server"

    def run(
        self, program: Program, floatx: str = "float32", trains: bool | None = None, deadline_s: float = DEADLINE_S
    ) -> list[Outcome]:
        """Runs a program and returns the answer of each rank.

        A rank that does not answer in time has the error "Hang", with the stacks of its threads; one that died, "Died".
        """
        if self._since_start >= _LIFETIME:
            self.close_processes()
        self.start()
        self._runs += 1
        self._since_start += 1
        folder = self._folder / f"run{self._runs}"
        trains = self.trains if trains is None else trains
        message = {"program": program.to_json(), "folder": str(folder), "floatx": floatx, "trains": trains}
        answers = self._ask(message, deadline_s)
        shutil.rmtree(folder, ignore_errors=True)
        found = [Outcome(**answer) for answer in answers]
        errors = [o.error for o in found if o.error and not o.error["ours"]]
        self.is_suspect = self.is_suspect or bool(errors)
        if errors and (self.ranks > 1 or any(error["type"] in ("Hang", "Died") for error in errors)):
            self.close_processes()  # Ranks may have stopped at different places.
        return found

    def _ask(self, message: dict[str, Any], deadline_s: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        end, cpu = time.monotonic() + deadline_s, self._cpu_s()
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(message)
            except OSError:
                answers[rank] = self._silent("Died", rank)
        while len(answers) < self.ranks:
            left = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
            ready = wait(list(left), max(0.0, min(_STILL_S, end - time.monotonic())))
            if not ready and time.monotonic() < end:
                cpu, before = self._cpu_s(), cpu
                if cpu - before > _STILL_CPU_S:
                    continue
            if not ready:
                self._show_stacks()
                answers.update({rank: self._silent("Hang", rank) for rank in left.values()})
            for connection in ready:
                rank = left[connection]  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[rank] = self._silent("Died", rank)
                if answers[rank]["error"]:
                    end = min(end, time.monotonic() + _GRACE_S)
        return [answers[rank] for rank in range(self.ranks)]

    def _cpu_s(self) -> float:
        """Returns the CPU time of the processes since they started."""
        total = 0.0
        for process in self._job.processes if self._job else []:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(process.pid).cpu_times()
                total += times.user + times.system
        return total

    def _show_stacks(self) -> None:
        for process in self._job.processes if self._job else []:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR2)
        time.sleep(1.0)

    def _silent(self, kind: str, rank: int) -> dict[str, Any]:
        log = self._job.folder / f"log.{rank}" if self._job else None
        said = log.read_text(errors="replace")[-4000:] if log and log.exists() else ""
        what = "it did not answer before the deadline" if kind == "Hang" else "its process ended"
        error = {"type": kind, "ours": False, "message": what, "traceback": said}
        return {"values": {}, "arrays": {}, "error": error, "seconds": 0.0}

    def close_processes(self) -> None:
        """Ends the processes; the next program starts new ones."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._job is not None:
            self._job.kill()
            self._job = None
            self.restarts += 1
        self.is_suspect = False

    def close(self) -> None:
        """Ends the processes and removes their files."""
        self.close_processes()
        shutil.rmtree(self._folder, ignore_errors=True)


def _start_roles(folder: Path, words: list[str], workers: int, servers: int) -> engines.Job:
    """Starts a coordinator, which answers, with its workers and servers."""
    coordinator, *ports = free_ports(1 + workers + servers)
    addresses = {"chief": [coordinator], "worker": ports[:workers], "ps": ports[workers:]}
    cluster = {role: [f"127.0.0.1:{port}" for port in numbers] for role, numbers in addresses.items()}
    job = engines.Job(folder)
    for role in addresses:
        for index in range(len(addresses[role])):
            task = {"cluster": cluster, "task": {"type": role, "index": index}}
            own = folder if role == "chief" else folder / f"{role}{index}"
            job.processes += engines.start(own, words, env={"TF_CONFIG": json.dumps(task)}).processes
    return job
