"""Jobs of a few ranks over each transport, as a user starts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_process import Job, job, write_script

# Generous: three processes load TensorFlow on a busy machine.
DEADLINE_S = 240.0

# What a test runs over: parametrize `engine` by it. A word after the strategy's name is its transport.
ENGINES = [
    "multiworker",
    pytest.param("multiworker_ring", marks=pytest.mark.thorough),
    pytest.param("horovod", marks=pytest.mark.horovod),
    pytest.param("horovod_mpi", marks=[pytest.mark.horovod, pytest.mark.thorough]),
]

# Of what is the same code over every transport: TensorFlow's each time, Horovod with `-m thorough`.
OVER_ONE = ["multiworker", pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.thorough])]

_BACKENDS = {"horovod": ("horovod", "horovod_path"), "horovod_mpi": ("mpi", "horovod_with_mpi")}

RunRanks = Callable[..., list[str]]
Provide = Callable[[str], Path]


def strategy_of(engine: str) -> str:
    """Returns the name of the strategy of one of `ENGINES`."""
    return engine.removesuffix("_mpi").removesuffix("_ring")


def engine_options(provide: Provide, engine: str) -> tuple[list[str], dict[str, str]]:
    """Returns the options of `tfdistkit run` for an engine, and variables for its ranks.

    Args:
        provide: Returns the folder that a fixture of this name makes (Horovod), or skips the test.
        engine: One of `ENGINES`, a strategy of one process, or `parameter_server`.
    """
    if engine == "parameter_server":
        return ["--ps", "1"], {}
    if engine not in _BACKENDS:
        return [], {"TFDISTKIT_COMMUNICATION": "ring"} if engine == "multiworker_ring" else {}
    backend, fixture = _BACKENDS[engine]
    path = [str(provide(fixture)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return ["--backend", backend], {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@contextlib.contextmanager
def start_ranks(
    provide: Provide, engine: str, words: list[str], folder: Path, world_size: int, **variables: str
) -> Iterator[Job]:
    """Starts a script on each rank, by `tfdistkit run`.

    Args:
        provide: Returns the folder that a fixture of this name makes (Horovod), or skips the test.
        engine: One of `ENGINES`, or a strategy of one process.
        words: The script and its arguments.
        folder: Where it runs; the logs go to its `logs`.
        world_size: How many ranks.
        **variables: For the environment of the ranks.
    """
    options = ["-np", str(world_size), "--log-dir", str(folder / "logs"), "--threads-per-worker", "1"]
    more_options, path = engine_options(provide, engine)
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", **path, **variables}
    with job(*options, *more_options, *words, cwd=folder, **variables) as running:
        yield running


def runner(request: pytest.FixtureRequest) -> RunRanks:
    """Returns what runs a job; Horovod comes from a fixture of the session, which may skip the test."""

    def run_ranks(engine: str, code: str, folder: Path, world_size: int = 2, **variables: str) -> list[str]:
        """Runs a script on each rank and returns what each printed; all have to succeed.

        Args:
            engine: One of `ENGINES`, or a strategy of one process; the script finds the strategy in `sys.argv[1]`.
            code: The script.
            folder: Where the script and the logs go.
            world_size: How many ranks.
            **variables: For the environment of the ranks.
        """
        words = [write_script(folder, code), strategy_of(engine)]
        with start_ranks(request.getfixturevalue, engine, words, folder, world_size, **variables) as running:
            ended = running.end(DEADLINE_S)
            assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
            assert running.left() == []
        return [(folder / "logs" / f"rank.{rank}" / "stdout").read_text() for rank in range(world_size)]

    return run_ranks
