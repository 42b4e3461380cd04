"""MPI ranks on this machine: `mpirun` creates the world, the launcher starts the workers in it.

mpirun itself would mix the output of all ranks, kill the peers of a failed rank before they can report, and ignore
crash records. So it starts placeholders (`rank_placeholder`), one per rank; each passes on the variables by which MPI
finds its runtime, and the launcher starts the worker with these as its child: watched, logged and stopped as a local
one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tfdistkit import env
from tfdistkit.cluster.environments import horovod
from tfdistkit.cluster.environments.mpi import OPEN_MPI
from tfdistkit.errors import MissingDependencyError, UnsupportedError, explain
from tfdistkit.launcher.local import backend as local
from tfdistkit.launcher.mpi import rank_placeholder
from tfdistkit.launcher.spec import ProcessSpec

# mpirun takes 0.1 s; more on a busy machine.
_START_S = 30.0
_POLL_S = 0.05
# Time for mpirun to exit after its ranks.
_END_S = 5.0

# Horovod's timeout for a silent peer in Gloo, and the variable that sets it.
_PATIENCE_S = 30.0
_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"

_GLOO = horovod.NAMES
# Variables of the shell that may describe another cluster.
_OTHER_CLUSTERS = (env.TF_CONFIG, _GLOO.rank, _GLOO.size, _GLOO.local_rank, _GLOO.local_size)

_HOW_TO_INSTALL = "Install Open MPI: apt-get install openmpi-bin libopenmpi-dev"


class Launcher(local.Launcher):
    """Starts MPI ranks (see `backend.Backend`).

    Args:
        job_id: The job's mark.
        size: The number of ranks: all processes of the job.
        mpi_args: Extra options for mpirun.
    """

    def __init__(self, job_id: str, size: int, mpi_args: Sequence[str] = ()):
        super().__init__(job_id, size)
        self._folder = Path(tempfile.mkdtemp(prefix="tfdistkit-mpi-"))
        self._world: _World | None = None
        try:
            self._world = _World(self._folder, size, env.child_env({env.JOB_ID: job_id}), mpi_args)
            self._world.gather(_START_S)
        except BaseException:
            self.close()
            raise

    def own_variables(self, spec: ProcessSpec) -> Mapping[str, str | None]:
        assert self._world is not None
        self.patience_s = patience_of(spec)
        return {**without_other_clusters(spec), **self._world.variables(spec.number)}

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
        # Also kills remaining placeholders: they have the job's mark.
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def without_other_clusters(spec: ProcessSpec) -> dict[str, None]:
    """Returns the variables to remove from a process: those of the shell describe another cluster.

    Args:
        spec: The process; variables that it sets itself are kept.
    """
    return {name: None for name in _OTHER_CLUSTERS if name not in spec.env}


def patience_of(spec: ProcessSpec) -> float:
    """Returns the timeout for a suspended rank: MPI itself waits for ever, so it takes Gloo's timeout.

    Args:
        spec: The rank, whose variables may set Gloo's timeout.
    """
    return float(spec.env.get(_TIMEOUT) or env.text(_TIMEOUT) or _PATIENCE_S)


def mpirun_command(size: int, slot_command: list[str], *, is_root: bool, more: Sequence[str] = ()) -> list[str]:
    """Returns the command that creates an MPI world.

    Args:
        size: The number of ranks.
        slot_command: The command of each rank.
        is_root: Whether the user is root, which Open MPI rejects without `--allow-run-as-root`.
        more: Extra options; the last of conflicting options wins.

    Raises:
        MissingDependencyError: if mpirun is not installed.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise MissingDependencyError(
            explain("`mpirun` was not found.", expected="Open MPI on the PATH", do=_HOW_TO_INSTALL)
        )
    # Not bound to cores: TensorFlow's threads may use all cores of the launcher. Oversubscription is the user's choice.
    options = ["--bind-to", "none", "--map-by", "slot", "--oversubscribe", *(["--allow-run-as-root"] * is_root)]
    return [mpirun, *options, *more, "-np", str(size), *slot_command]


class _World:
    """A running mpirun and the variables of its ranks."""

    def __init__(self, folder: Path, size: int, variables: Mapping[str, str], mpi_args: Sequence[str]):
        self._size = size
        self._ranks: dict[int, dict[str, str]] = {}
        self._held: list[socket.socket] = []
        self._base = variables
        path = folder / "slots"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(size)
        self._listener.settimeout(_POLL_S)
        self._complaints = folder / "mpirun.log"
        command = mpirun_command(
            size,
            [sys.executable, "-I", "-S", rank_placeholder.__file__, str(path)],
            is_root=os.geteuid() == 0,
            more=mpi_args,
        )
        with self._complaints.open("wb") as log:
            self._mpirun = subprocess.Popen(
                command,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def gather(self, timeout_s: float) -> None:
        """Waits until mpirun has started a placeholder for each rank.

        Raises:
            UnsupportedError: if it does not; the message holds its output.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._ranks) < self._size:
            if self._mpirun.poll() is not None or time.monotonic() > deadline:
                raise UnsupportedError(self._failure())
            with contextlib.suppress(TimeoutError):
                held, _ = self._listener.accept()
                held.settimeout(max(0.1, deadline - time.monotonic()))
                self._held.append(held)
                with held.makefile("rb") as stream:
                    self._take(stream)

    def variables(self, rank: int) -> dict[str, str]:
        """Returns the variables that mpirun set for one rank: the rank itself, and the address of MPI's runtime."""
        return {name: value for name, value in self._ranks[rank].items() if self._base.get(name) != value}

    def close(self) -> None:
        """Releases the placeholders, and ends mpirun."""
        self._listener.close()
        for held in self._held:
            held.close()
        if not _ends(self._mpirun, _END_S if len(self._ranks) == self._size else 0):
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._mpirun.pid, number)
                if _ends(self._mpirun, _END_S):
                    break

    def _take(self, stream: IO[bytes]) -> None:
        line = stream.readline()
        if not line.endswith(b"\n"):
            return  # the placeholder was killed early; mpirun reports the reason
        variables: dict[str, str] = json.loads(line)
        rank = variables.get(OPEN_MPI.rank, "")
        if not rank.isdecimal():
            command = str(self._mpirun.args)
            raise UnsupportedError(
                explain(
                    "`mpirun` must be Open MPI's.",
                    received=f"{command}, which does not set {OPEN_MPI.rank}",
                    do=f"{_HOW_TO_INSTALL}. Under another MPI, start the script with its own mpirun.",
                )
            )
        self._ranks[int(rank)] = variables

    def _failure(self) -> str:
        code = self._mpirun.poll()
        said = self._complaints.read_text(errors="replace").strip()
        return explain(
            f"mpirun did not start {self._size} ranks.",
            received=f"exit code {code}" if code is not None else f"{len(self._ranks)} ranks after {_START_S:g} s",
            do=f"Its output:\n{said}" if said else None,
        )


def _ends(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
