"""Tries each strategy in separate processes, as `tfdistkit run` starts them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.doctor.findings import Finding, Level
from tfdistkit.errors import TfdistkitError
from tfdistkit.horovod_build.checking import INSTALL
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.output.sinks import NowhereSink
from tfdistkit.launcher.preparing import prepare_attempt
from tfdistkit.launcher.spec import JobSpec, temporary_run_dir
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.supervisor import run_job

_PROBE = ("-m", "tfdistkit.doctor.probe")
# Timeout in seconds, mostly for loading TensorFlow on a busy machine.
_TIMEOUT_S = 180.0
# Most lines of an error in a finding.
_MOST_LINES = 4


@dataclass(frozen=True)
class Trial:
    """Describes the trial of a strategy.

    Args:
        processes: The number of workers.
        backend: The launcher's backend.
        ps: The number of parameter servers.
    """

    processes: int = 1
    backend: str = "local"
    ps: int = 0


# In order of execution.
TRIALS: Mapping[str, Trial] = {
    "mirrored": Trial(),
    "central_storage": Trial(),
    "multiworker": Trial(2),
    "parameter_server": Trial(1, ps=1),
    "horovod": Trial(2, backend="horovod"),
}
# Strategies that work on several hosts.
ON_HOSTS = tuple(name for name, trial in TRIALS.items() if trial.processes > 1 or trial.ps)


def try_strategies(names: Sequence[str], hosts: HostsSpec | None, env: Mapping[str, str]) -> list[Finding]:
    """Tries strategies one after the other.

    Args:
        names: Keys of `TRIALS`.
        hosts: Hosts with one process on each; None for this machine.
        env: Variables for the processes.
    """
    return [_try(name, TRIALS[name], hosts, env) for name in names]


def _try(name: str, trial: Trial, hosts: HostsSpec | None, env: Mapping[str, str]) -> Finding:
    run_dir = temporary_run_dir(Path(tempfile.gettempdir()))
    count = trial.processes if hosts is None else len(hosts.slots)
    started_here = count + (trial.ps + 1 if trial.ps else 0)
    place = f"{started_here} {'process' if started_here == 1 else 'processes'}" if hosts is None else f"{count} hosts"
    started = time.monotonic()
    try:
        job = JobSpec(
            count,
            (*_PROBE, name),
            run_dir,
            env,
            timeout_s=_TIMEOUT_S,
            backend=trial.backend,
            ps=trial.ps,
            hosts=hosts,
        )
        prepared = prepare_attempt(job)
        nowhere = NowhereSink()
        console = Console(nowhere, nowhere, [process.name.label for process in prepared.processes])
        result = run_job(job, prepared.processes, console, backend=prepared.backend)
    except TfdistkitError as error:
        return Finding("strategies", name, Level.PROBLEM, str(error), _step(name))
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    seconds = time.monotonic() - started
    if result.outcome is Outcome.SUCCEEDED:
        return Finding(
            "strategies", name, Level.GOOD, f"works: {place}, {seconds:.1f} s to start, all-reduce and train"
        )
    if result.outcome is Outcome.TIMED_OUT:
        return Finding(
            "strategies", name, Level.PROBLEM, f"{place} did not finish within {_TIMEOUT_S:g} s", _step(name)
        )
    failure = result.failures[0] if result.failures else None
    text = f"{failure.name} {failure.headline}: {_end_of(failure.message or failure.loss)}" if failure else "it exited"
    return Finding("strategies", name, Level.PROBLEM, text, _step(name))


def _end_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[:_MOST_LINES])


def _step(name: str) -> str:
    if name == "horovod":
        return f"{INSTALL}; then check it: tfdistkit doctor --strategy horovod"
    trial = TRIALS[name]
    ps = f"--ps {trial.ps} " if trial.ps else ""
    return f"Read its whole output: tfdistkit run -np {trial.processes} {ps}-m tfdistkit.doctor.probe {name}"
