"""The launcher's side of the Ray driver: starts its process, waits until the actors are there, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tfdistkit
from tfdistkit.errors import TfdistkitError, UnsupportedError, explain
from tfdistkit.launcher.ray import problems
from tfdistkit.launcher.ray.connection import Pipes

_POLL_S = 0.1
# To start a cluster on this machine takes Ray 3 to 10 seconds, more on a busy machine; to connect to one, 1 or 2.
CONNECT_S = 90.0
# To create the actors, once their resources are reserved: each is a new process that imports Ray.
_ACTORS_S = 60.0
# Time for the driver to end its actors, and the cluster that it started.
_END_S = 15.0
_LINE_BYTES = 65_536
_LOG_BYTES = 2_000

# Not the current folder: a `ray.py` there would hide Ray.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from tfdistkit.launcher.ray.{module} import run; run()"


class DriverProcess:
    """The process of the Ray driver.

    Args:
        task: What it does, as plain data: `address`, `bundles`, `group`, `nodes`, `timeout_s`, `cores` and
            the agents' `command`.
        pipes: The pipes to each agent.
        variables: Its environment.
        log: The file for what Ray itself prints.
    """

    def __init__(self, task: Mapping[str, Any], pipes: Sequence[Pipes], variables: Mapping[str, str], log: Path):
        self._task, self._log = task, log
        self._answers, answers = os.pipe()
        descriptors = [one.driver_ends for one in pipes]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*program_of("driver"), str(answers)],
                env=dict(variables),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                pass_fds=[answers, *(one for ends in descriptors for one in ends)],
                start_new_session=True,
            )
        self.pid = self._process.pid
        os.close(answers)
        for one in pipes:
            one.close_driver_ends()
        self._unread = b""
        self._has_answered = False
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; `wait_until_ready` tells why
            self._process.stdin.write(json.dumps({**task, "descriptors": descriptors}).encode() + b"\n")
            self._process.stdin.flush()

    def wait_until_ready(self, should_stop: Callable[[], bool]) -> tuple[str, list[dict[str, Any]]]:
        """Waits until all actors run.

        Args:
            should_stop: Whether to stop waiting.

        Returns:
            Ray's version and the address of the cluster, and the facts of the node of each actor.

        Raises:
            TfdistkitError: if the driver cannot connect, or place the actors.
        """
        connected = self._next("to connect", CONNECT_S, should_stop)
        # The driver has a deadline of its own for the resources; this one is the last resort.
        placing_s = self._task["timeout_s"] * 2 + _ACTORS_S
        ready = self._next("to start the actors", placing_s, should_stop)
        self._has_answered = True
        return f"Ray {connected['version']} at {connected['address']}", ready["nodes"]

    def close(self) -> None:
        """Ends the driver, and with it the actors and a cluster that it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        # While it connects it does not read: Ray notices that it is gone, and the launcher kills a cluster of its own.
        for number in (None, signal.SIGTERM, signal.SIGKILL) if self._has_answered else (signal.SIGKILL,):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S if number is None else 2.0)
                break
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def _next(self, what: str, timeout_s: float, should_stop: Callable[[], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if should_stop():
                raise UnsupportedError("The start of the Ray actors was interrupted.")
            if time.monotonic() > deadline:
                raise self._failure(what, f"no answer within {timeout_s:g} s")
            ready, _, _ = select.select([self._answers], [], [], _POLL_S)
            if ready:
                data = os.read(self._answers, _LINE_BYTES)
                if not data:
                    self._process.wait(_END_S)
                    raise self._failure(what, f"exit code {self._process.returncode}")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if answer["is"] == "refused":
            self._has_answered = True
            raise problems.error_of(answer)
        return answer

    def _failure(self, what: str, received: str) -> TfdistkitError:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
            said = file.read().decode(errors="replace").strip()
        do = f"Its output:\n{said}" if said else None
        return UnsupportedError(explain(f"The Ray driver failed {what}.", received=received, do=do))


def program_of(module: str) -> list[str]:
    """Returns the command that runs a module of this folder, which imports Ray.

    Args:
        module: Its name.
    """
    return [sys.executable, "-c", _PROGRAM.format(path=_import_path(), module=module)]


def _import_path() -> list[str]:
    """Returns the import path of this process without the current folder, unless tfdistkit is there."""
    own = str(Path(tfdistkit.__file__).parents[1])
    return [own] + [one for one in sys.path if one and os.path.abspath(one) != os.getcwd()]
