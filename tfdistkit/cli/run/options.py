"""Parses the arguments of `tfdistkit run` into plain data; exits with a message for an error in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdistkit import env
from tfdistkit.cli.hints import translate, type_this
from tfdistkit.cli.run import elastic_options, host_options, ray_options, slurm_options
from tfdistkit.cli.run.parser import make_parser, spellings
from tfdistkit.cli.run.script_check import is_pipe, module_problem, piped_elsewhere, script_problem, workers_missing
from tfdistkit.errors import nearest
from tfdistkit.launcher.elasticity import ElasticSpec, PreemptionSpec
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.local.silent_folders import silent_folder
from tfdistkit.launcher.registry import own_options, row_of
from tfdistkit.launcher.slurm.batch_script import SlurmOptions
from tfdistkit.launcher.spec import HANG_TIMEOUT_S


@dataclass(frozen=True)
class RunOptions:
    """Holds the options of the command line."""

    np: int
    program: tuple[str, ...]
    env: dict[str, str]
    log_dir: Path | None
    timeout_s: float | None
    threads_per_worker: int | None
    is_dry_run: bool
    is_verbose: bool
    is_quiet: bool = False
    backend: str = "local"
    ps: int = 0
    max_restarts: int = 0
    hosts: HostsSpec | None = None
    mpi_args: tuple[str, ...] = ()
    backend_options: Any = None
    slurm: SlurmOptions | None = None
    is_piped: bool = False
    is_isolated: bool = False
    restart_window_s: float | None = None
    elastic: ElasticSpec | None = None
    preemption: PreemptionSpec | None = None
    hang_timeout_s: float | None = None


def parse(arguments: Sequence[str]) -> RunOptions:
    """Parses the arguments of `tfdistkit run`.

    Args:
        arguments: The arguments.

    Returns:
        The options.

    Raises:
        SystemExit: with 2 for an error, with 0 after --help.
    """
    parser = make_parser(_backend_in(arguments))
    found, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        parser.error(_unknown(unknown[0], arguments, spellings(parser)))
    # One list for the script and its arguments: argparse would remove the script's own `--`.
    words = found.program[1:] if found.program[:1] == ["--"] else found.program
    if not words:
        parser.error("no script is given. Expected: tfdistkit run -np 2 script.py")
    before = [word for word in arguments[: len(arguments) - len(words)] if word != "--"]
    row = row_of(found.backend)
    if not row.is_submitted:
        elastic_options.count_by_nodes(found, parser.error)
    if row.is_submitted and (problem := elastic_options.not_for_slurm(found)):
        parser.error(problem)
    own = {module.__name__: module.read(found, parser.error) for module in own_options(found.backend)}
    slurm, cluster = own.pop(slurm_options.__name__), own.pop(ray_options.__name__)
    hosts = cluster or host_options.read(found, parser.error)
    elastic = elastic_options.read(found, hosts, parser.error)
    if found.np is None and hosts is not None and cluster is None:
        found.np = hosts.total
    if found.np is None:
        parser.error(workers_missing(before, words))
    # First, because every other check touches these folders.
    script = None if found.module else words[0]
    if problem := silent_folder({"The working directory": ".", "The script": script, "`--log-dir`": found.log_dir}):
        parser.error(problem)
    problem = (module_problem if found.module else script_problem)(before, words)
    is_piped = not found.module and is_pipe(words[0])
    if found.isolate and (hosts is not None or slurm is not None):
        problem = "--isolate requires a job on this machine only. Remove it, or remove the hosts (-H, SLURM)."
    elif is_piped and (hosts is not None or slurm is not None):
        problem = piped_elsewhere(words[0])
    if problem:
        parser.error(problem)
    return RunOptions(
        np=found.np,
        program=("-m", *words) if found.module else tuple(words),
        env=dict([*found.passed, *found.env, *([(env.FULL_TRACEBACK, "1")] if found.full_traceback else [])]),
        log_dir=found.log_dir,
        timeout_s=found.timeout,
        threads_per_worker=found.threads_per_worker,
        is_dry_run=found.dry_run,
        is_verbose=found.verbose,
        is_quiet=found.quiet,
        backend=found.backend,
        ps=found.ps,
        max_restarts=found.max_restarts,
        hosts=hosts,
        mpi_args=found.mpi_args,
        backend_options=own.get(row.options or ""),
        slurm=slurm,
        is_piped=is_piped,
        is_isolated=found.isolate,
        restart_window_s=found.restart_window,
        elastic=elastic,
        preemption=elastic_options.preemption_of(found, parser.error),
        hang_timeout_s=_hang_timeout(found, hosts is not None or found.host_discovery_script is not None),
    )


def _backend_in(arguments: Sequence[str]) -> str:
    """Returns the backend that arguments name, before they are parsed: it may add options; empty without one."""
    for word, following in zip(arguments, [*arguments[1:], ""]):
        if word == "--backend" or word.startswith("--backend="):
            return following if word == "--backend" else word.partition("=")[2]
    return ""


def _hang_timeout(found: Any, is_elsewhere: bool) -> float | None:
    """Returns the hang timeout: by default one for several processes whose progress is seen; 0 switches it off."""
    if found.hang_timeout is None:
        row = row_of(found.backend)
        is_seen = not row.is_submitted and (row.watches_hosts or not is_elsewhere)
        return HANG_TIMEOUT_S if is_seen and found.np + found.ps > 1 else None
    return found.hang_timeout if found.hang_timeout != 0 else None


def _unknown(option: str, arguments: Sequence[str], known: list[str]) -> str:
    message = f"there is no option {option!r}."
    if bounds := elastic_options.of_others(option.partition("=")[0]):
        return f"{message} {bounds}"
    ours = translate(option, arguments)
    return f"{message}\n{type_this(ours)}" if ours else f"{message}{nearest(option.partition('=')[0], known)}"
