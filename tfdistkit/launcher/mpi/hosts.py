"""MPI ranks on several hosts: `mpirun` creates the world over ssh, and the launcher starts the workers in it.

As on one machine (`mpi.backend`), mpirun starts placeholders. The launcher's agent on each host starts the workers with
their variables, so workers are watched, logged and stopped as with every other backend.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdistkit import env
from tfdistkit.cluster.environments.mpi import OPEN_MPI
from tfdistkit.cluster.routes import addresses_of_interfaces
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.mpi.backend import mpirun_command, patience_of, without_other_clusters
from tfdistkit.launcher.planning import hosts_of_tasks
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.launcher.ssh import backend as ssh
from tfdistkit.launcher.ssh.workers import RemoteWorker

_SLOT = Path(__file__).with_name("remote_rank_placeholder.py")
_SLOT_WORD = b"tfdistkit-slot"
_POLL_S = 0.1
_END_S = 5.0


class Launcher(ssh.Launcher):
    """Starts MPI ranks on other hosts (see `ssh.Launcher`)."""

    def __init__(self, job: JobSpec, should_stop: Callable[[], bool] = lambda: False):
        self._world: _World | None = None
        super().__init__(job, should_stop)
        assert job.hosts is not None
        self._ranks = mpi_ranks(job)
        try:
            interfaces = {place.interface for place in self.places}
            self._world = _World(job, job.hosts, interfaces.pop() if len(interfaces) == 1 else None)
            self._world.gather(job.hosts.start_timeout_s, should_stop)
        except BaseException:
            self.close()
            raise

    def start(self, spec: ProcessSpec) -> RemoteWorker:  # type: ignore[override]
        assert self._world is not None
        # MPI waits for a silent peer for ever, so this takes the timeout of Horovod's Gloo.
        self.patience_s = patience_of(spec)
        rank = self._ranks[spec.number]
        self._more_variables = {**without_other_clusters(spec), **self._world.variables(rank)}
        return super().start(spec)

    def close(self) -> None:
        super().close()
        if self._world is not None:
            self._world.close()


def rank_hosts(job: JobSpec, hosts: HostsSpec) -> str:
    """Returns the value of `mpirun -H`: host names without a user, with one slot per rank.

    Args:
        job: The job.
        hosts: Its hosts.
    """
    used = hosts_of_tasks(job)
    return ",".join(f"{_name(hosts.slots[place].host)}:{used.count(place)}" for place in dict.fromkeys(used))


def mpi_ranks(job: JobSpec) -> list[int]:
    """Returns the rank of each process in MPI's world: mpirun numbers host by host, but servers are on all hosts.

    Args:
        job: The job, with hosts.
    """
    used = hosts_of_tasks(job)
    order = list(dict.fromkeys(used))
    by_rank = sorted(range(job.size), key=lambda number: order.index(used[number]))
    return [by_rank.index(number) for number in range(job.size)]


def agent_script(hosts: HostsSpec) -> str:
    """Returns a script for mpirun to call instead of ssh, as `script HOST COMMAND`, with the launcher's ssh options.

    Args:
        hosts: The hosts and the ssh options.
    """
    lines = ["#!/bin/sh", "host=$1", "shift", "case $host in"]
    for one in hosts.slots:
        # Without the last word, the command: mpirun passes one that is already quoted for the remote shell.
        reach = ssh.ssh_command(hosts, one.host, [])[:-1]
        lines.append(f'{shlex.quote(_name(one.host))}) exec {shlex.join(reach)} "$@" ;;')
    return "\n".join([*lines, "esac", 'echo "mpirun asked for $host, which is not one of the hosts" >&2', "exit 1", ""])


def _name(host: str) -> str:
    return host.rpartition("@")[2]


class _World:
    """A running mpirun and the variables of its ranks."""

    def __init__(self, job: JobSpec, hosts: HostsSpec, interface: str | None):
        self._size = job.size
        self._ranks: dict[int, dict[str, str]] = {}
        self._unread = b""
        self._folder = Path(tempfile.mkdtemp(prefix="tfdistkit-mpi-"))
        agent = self._folder / "agent"
        agent.write_text(agent_script(hosts))
        agent.chmod(0o700)
        options = ["-H", rank_hosts(job, hosts), "--mca", "plm_rsh_agent", str(agent)]
        # Without the tree, the hosts need no ssh access to each other.
        options += ["--mca", "plm_rsh_no_tree_spawn", "1"]
        options += interface_options(interface)
        command = mpirun_command(
            job.size,
            [hosts.python, "-I", "-S", "-c", _SLOT.read_text(encoding="utf-8")],
            is_root=os.geteuid() == 0,
            more=[*options, *job.mpi_args],
        )
        self._complaints = self._folder / "mpirun.log"
        with self._complaints.open("wb") as log:
            self._mpirun = subprocess.Popen(
                command,
                # The job's mark: the watchdog kills mpirun too, and with it the placeholders.
                env=env.child_env({env.JOB_ID: job.job_id}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def gather(self, timeout_s: float, should_stop: Callable[[], bool]) -> None:
        """Waits until mpirun has started a placeholder for each rank.

        Raises:
            UnsupportedError: if it does not; the message holds its output.
        """
        assert self._mpirun.stdout is not None
        descriptor = self._mpirun.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while len(self._ranks) < self._size:
            ready, _, _ = select.select([descriptor], [], [], _POLL_S)
            data = os.read(descriptor, 65_536) if ready else b""
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(line)
            if (ready and not data) or time.monotonic() > deadline or should_stop():
                raise UnsupportedError(self._failure(timeout_s))

    def variables(self, rank: int) -> dict[str, str]:
        """Returns the variables that mpirun set for one rank: the rank itself, and the address of MPI's runtime."""
        return self._ranks[rank]

    def close(self) -> None:
        """Ends mpirun, which ends its placeholders and daemons on all hosts."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._mpirun.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._mpirun.wait(_END_S)
                break
        if self._mpirun.stdout is not None:
            self._mpirun.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take(self, line: bytes) -> None:
        word, _, encoded = line.partition(b" ")
        if word != _SLOT_WORD:
            return  # other output of the host
        with contextlib.suppress(ValueError, zlib.error, binascii.Error):
            variables = json.loads(zlib.decompress(base64.b64decode(encoded, validate=True)))
            self._ranks[int(variables[OPEN_MPI.rank])] = variables

    def _failure(self, timeout_s: float) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(_POLL_S)
        code = self._mpirun.poll()
        said = self._complaints.read_text(errors="replace").strip()
        return explain(
            f"mpirun did not start {self._size} ranks.",
            received=f"exit code {code}" if code is not None else f"{len(self._ranks)} ranks after {timeout_s:g} s",
            expected="Open MPI on all hosts",
            do=f"Its output:\n{said}" if said else None,
        )


def interface_options(interface: str | None) -> Sequence[str]:
    """Returns the options for Open MPI to use one network interface, also for its daemons if this machine has it.

    Args:
        interface: The interface's name on all hosts; None for Open MPI's choice.
    """
    if interface is None:
        return []
    here = ["--mca", "oob_tcp_if_include", interface] if interface in addresses_of_interfaces() else []
    return ["--mca", "btl_tcp_if_include", interface, *here]
