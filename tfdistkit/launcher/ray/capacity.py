"""The room of a Ray cluster for an elastic job, as a process of its own tells it (`watcher`). Imports no Ray."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdistkit import env
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import explain
from tfdistkit.launcher.ray import problems
from tfdistkit.launcher.ray.cluster import LOCAL, RaySpec, bundle_of, group_of, require_ray
from tfdistkit.launcher.ray.driver_process import CONNECT_S, program_of
from tfdistkit.launcher.spec import JobSpec

# Between two watchers, after one has failed.
_AGAIN_S = 5.0
_END_S = 2.0
_READ_BYTES = 65_536
_SHOWN_BYTES = 400


class Capacity:
    """Reads how many workers fit on each node; a new list counts when two in a row agree.

    Args:
        job: The job, whose hosts are a `RaySpec`.
        note: Shows a message to the user.

    Raises:
        MissingDependencyError: if Ray is not installed.
    """

    def __init__(self, job: JobSpec, note: Callable[[str], None]):
        assert isinstance(job.hosts, RaySpec)
        require_ray()
        self._cluster, self._job_id, self.note = job.hosts, job.job_id, note
        self._log = tempfile.TemporaryFile()
        self._process: subprocess.Popen[bytes] | None = None
        self._due = self._deadline = 0.0
        # Not its stdout, to which Ray prints.
        self._pipe = -1
        self._unread = b""
        self._last: list[HostSlots] | None = None
        self._skipped = 0
        self.problem, self.is_current = "", False

    def poll(self) -> Sequence[HostSlots] | None:
        """Returns the nodes if two answers in a row agree on them; never waits."""
        if self._process is None:
            if time.monotonic() >= self._due:
                self._start()
            return None
        code = self._process.poll()  # before its last answers are read
        confirmed = None
        for answer in self._answers():
            if answer["is"] != "nodes":
                self._fail(str(problems.error_of(answer)))
                return None
            confirmed = self._confirmed([HostSlots(*one) for one in answer["nodes"]]) or confirmed
        if code is not None:
            self._fail(self._failure(f"exit code {code}"))
        elif time.monotonic() > self._deadline:
            self._fail(self._failure(f"no answer within {CONNECT_S:g} s"))
        return confirmed

    def renew(self) -> None:
        """Discards what was told before now: `is_current` is False until two later answers agree."""
        if self._process is not None:
            list(self._answers())
        # The next answer may be from before now.
        self._last, self._skipped, self.is_current = None, 1, False

    def close(self) -> None:
        """Ends the watcher."""
        self._end()
        self._log.close()

    def _start(self) -> None:
        # A mark of its own: the end of an attempt kills all processes with the job's.
        variables = env.child_env({env.JOB_ID: f"{self._job_id}.room"})
        self._pipe, answers = os.pipe()
        self._process = subprocess.Popen(
            [*program_of("watcher"), str(answers)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            bufsize=0,
            pass_fds=[answers],
            start_new_session=True,
        )
        os.close(answers)
        os.set_blocking(self._pipe, False)
        assert self._process.stdin is not None
        address = self._cluster.ray_address
        task = {"address": address, "bundle": bundle_of(self._cluster, "worker"), "group": group_of(self._job_id)}
        with contextlib.suppress(BrokenPipeError):  # it has died; `poll` tells why
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._unread, self._last = b"", None
        self._deadline = time.monotonic() + CONNECT_S

    def _answers(self) -> list[dict[str, Any]]:
        """Returns the answers that have come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, _READ_BYTES):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        if lines:
            self._deadline = time.monotonic() + CONNECT_S
        return [json.loads(line) for line in lines]

    def _confirmed(self, nodes: list[HostSlots]) -> Sequence[HostSlots] | None:
        if self._skipped:
            self._skipped -= 1
            return None
        if self.problem:
            self.problem = ""
            self.note(f"tfdistkit: {self._cluster.where} tells its room again.")
        nodes.sort(key=lambda one: one.host)
        is_same, self._last = nodes == self._last, nodes
        self.is_current = self.is_current or is_same
        return nodes if is_same else None

    def _fail(self, problem: str) -> None:
        """Ends a watcher that failed; another one follows. Shows the problem once, unless the job has not begun."""
        self._end()
        self._due = time.monotonic() + _AGAIN_S
        if self.is_current and problem != self.problem:
            told = problem.replace("\n", " ")
            self.note(f"tfdistkit: the room of {self._cluster.where} stays as it was: {told}")
        self.problem = problem

    def _failure(self, received: str) -> str:
        size = os.fstat(self._log.fileno()).st_size
        said = os.pread(self._log.fileno(), _SHOWN_BYTES, max(0, size - _SHOWN_BYTES)).decode(errors="replace").strip()
        do = f"Its output:\n{said}" if said else None
        return explain("The watcher of the Ray cluster must tell the room on its nodes.", received=received, do=do)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        os.close(self._pipe)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def capacity_of(job: JobSpec, note: Callable[[str], None]) -> Capacity | None:
    """Returns what tells the room of a job's cluster; None for a cluster of its own, whose room is this machine's.

    Args:
        job: The job, whose hosts are a `RaySpec`.
        note: Shows a message to the user.

    Raises:
        MissingDependencyError: if Ray is not installed.
    """
    assert isinstance(job.hosts, RaySpec)
    return None if job.hosts.ray_address == LOCAL else Capacity(job, note)
