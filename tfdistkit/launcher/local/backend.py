"""Workers on this machine: each in its own session, killed by a watchdog if the launcher dies."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO

from tfdistkit import env
from tfdistkit.launcher.backend import Loss
from tfdistkit.launcher.local import watchdog
from tfdistkit.launcher.spec import ProcessSpec

# Poll interval on systems without pidfd (Linux before 5.3, macOS).
_POLL_S = 0.02
# For a worker that other code of this process reaped (a SIGCHLD handler), so that its exit code is lost.
_UNKNOWN_EXIT_CODE = 255


class LocalProcess:
    """A worker on this machine, with the processes that it starts (its process group)."""

    loss: Loss | None = None

    def __init__(self, spec: ProcessSpec, child: subprocess.Popen[bytes]):
        assert child.stdout is not None and child.stderr is not None
        self.spec = spec
        self.host = os.uname().nodename
        self.pid = child.pid
        self.stdout: IO[bytes] = child.stdout
        self.stderr: IO[bytes] = child.stderr
        self._child = child
        self._exit_code: int | None = None

    def exit_code(self) -> int | None:
        # WNOWAIT keeps the zombie: its process id cannot be reused, so a signal reaches only its own group.
        if self._exit_code is None:
            try:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._exit_code = _UNKNOWN_EXIT_CODE
            else:
                if ended is not None:
                    self._exit_code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self._exit_code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def is_gone(self) -> bool:
        return self.exit_code() is not None and not watchdog.group_members(self.pid)

    def is_suspended(self) -> bool:
        return watchdog.process_state(self.pid) in ("T", "t")

    def collect(self) -> None:
        """Reaps the ended process; from now on its process id can be reused."""
        if self.exit_code() is not None:  # One that is blocked in the kernel cannot be reaped.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=1)


class Launcher:
    """Starts workers as children of this process (see `backend.Backend`).

    Each worker gets its own session: a signal from the terminal reaches only the launcher, which forwards it, and a
    worker is stopped together with all processes that it started.
    """

    # TensorFlow and Gloo detect a silent peer.
    patience_s: float | None = None
    # A peer can report a killed process before the process has ended.
    blindness_s = 1.0

    def __init__(self, job_id: str, world_size: int = 1):
        self._mark = f"{env.JOB_ID}={job_id}"
        self._job_id = job_id
        self._workers: list[LocalProcess] = []
        self._pidfds: dict[int, LocalProcess] = {}
        self._is_closed = False
        self._watchdog = self._start_watchdog()

    def start(self, spec: ProcessSpec) -> LocalProcess:
        variables = {**spec.env, **self.own_variables(spec), env.JOB_ID: self._job_id, env.PARENT_PID: str(os.getpid())}
        child = subprocess.Popen(
            spec.command,
            env=env.child_env(variables),
            stdin=None if spec.passes_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        worker = LocalProcess(spec, child)
        self._workers.append(worker)
        self._tell_watchdog(f"+{worker.pid}\n")
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an older kernel
                self._pidfds[os.pidfd_open(worker.pid)] = worker
        return worker

    def own_variables(self, spec: ProcessSpec) -> Mapping[str, str | None]:
        """Returns variables of a worker that are only known at its start; None removes a variable."""
        return {}

    def wait(self, timeout_s: float) -> None:
        running = [worker for worker in self._workers if worker.exit_code() is None]
        watched = {fd for fd, worker in self._pidfds.items() if worker in running}
        if len(watched) < len(running) or not running:
            time.sleep(min(timeout_s, _POLL_S))
            return
        poller = select.poll()
        for fd in watched:
            poller.register(fd, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        groups = [worker.pid for worker in self._workers if not worker.is_gone()]
        watchdog.kill_all(groups, self._mark)
        for worker in self._workers:
            self._tell_watchdog(f"-{worker.pid}\n")
            worker.collect()
        for fd in self._pidfds:
            os.close(fd)
        self._end_watchdog()

    def _start_watchdog(self) -> subprocess.Popen[bytes]:
        # Without the mark of an enclosing job: ending that job must not kill this watchdog.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid()), self._mark],
            env=env.child_env({env.JOB_ID: None}),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def _tell_watchdog(self, line: str) -> None:
        assert self._watchdog.stdin is not None
        with contextlib.suppress(OSError):  # the watchdog was killed; the launcher works without it
            self._watchdog.stdin.write(line.encode())

    def _end_watchdog(self) -> None:
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        try:
            self._watchdog.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._watchdog.send_signal(signal.SIGKILL)
            self._watchdog.wait()
