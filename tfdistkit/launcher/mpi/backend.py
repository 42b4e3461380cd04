"""MPI ranks on this machine: `mpirun` makes the world, the launcher starts the workers in it.

mpirun itself would mix the output of all ranks, kill the others before they could say what happened, and know nothing
of crash records. So it starts placeholders (`mpi_slot`), one per rank; each hands over the variables by which MPI finds
its runtime, and the worker is started with these as a child of the launcher: watched, logged and ended as a local one.
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

# mpirun needs a tenth of a second; a busy machine, somewhat more.
_START_S = 30.0
_POLL_S = 0.05
# How long mpirun may take to end when its ranks have.
_END_S = 5.0

# Horovod's own patience with a silent peer, and the variable that changes it.
_PATIENCE_S = 30.0
_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"

_GLOO = horovod.NAMES
# What a shell may hold of them.
_OTHER_CLUSTERS = (env.TF_CONFIG, _GLOO.rank, _GLOO.size, _GLOO.local_rank, _GLOO.local_size)

_HOW_TO_INSTALL = "Install Open MPI: apt-get install openmpi-bin libopenmpi-dev"


class Launcher(local.Launcher):
    """Starts MPI ranks (see `backend.Backend`).

    Args:
        job_id: The job's mark.
        size: How many ranks: all processes of the job.
        mpi_args: More options for mpirun.
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
        # Kills the placeholders too, should they still be there: they carry the job's mark.
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def without_other_clusters(spec: ProcessSpec) -> dict[str, None]:
    """Returns the variables that a process must not inherit: in the shell they would describe another cluster.

    Args:
        spec: The process, and what it is told itself.
    """
    return {name: None for name in _OTHER_CLUSTERS if name not in spec.env}


def patience_of(spec: ProcessSpec) -> float:
    """Returns how long a suspended rank is waited for: MPI itself waits for ever; as long as Gloo does is enough.

    Args:
        spec: The rank, whose variables may tell how long Gloo would wait.
    """
    return float(spec.env.get(_TIMEOUT) or env.text(_TIMEOUT) or _PATIENCE_S)


def mpirun_command(size: int, slot_command: list[str], *, is_root: bool, more: Sequence[str] = ()) -> list[str]:
    """Returns the command that makes an MPI world.

    Args:
        size: How many ranks.
        slot_command: What each rank runs.
        is_root: Whether the user is root, to whom Open MPI says no unless told otherwise.
        more: More options; of two that contradict each other, mpirun takes the last.

    Raises:
        MissingDependencyError: if there is no mpirun.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise MissingDependencyError(
            explain("`mpirun` was not found.", expected="Open MPI on the PATH", do=_HOW_TO_INSTALL)
        )
    # Not bound to cores: TensorFlow's threads spread over all that the launcher may use. More ranks than cores are
    # the user's decision.
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
            UnsupportedError: if it does not, with what it said.
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
        """Returns what mpirun changed for one rank: the rank itself, and how to reach MPI's runtime."""
        return {name: value for name, value in self._ranks[rank].items() if self._base.get(name) != value}

    def close(self) -> None:
        """Lets go of the placeholders, and ends mpirun."""
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
            return  # it was killed before it could speak; mpirun will say why
        variables: dict[str, str] = json.loads(line)
        rank = variables.get(OPEN_MPI.rank, "")
        if not rank.isdecimal():
            raise UnsupportedError(
                explain(
                    "This `mpirun` is not Open MPI's.",
                    received=str(self._mpirun.args),
                    expected=f"one that sets {OPEN_MPI.rank}",
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
            do=f"It said:\n{said}" if said else None,
        )


def _ends(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
