"""The options of `tfdistkit run --backend slurm`, as plain data; every mistake in them ends here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

BACKEND = "slurm"

# What an option of sbatch must not be, because the launcher gives it itself or cannot follow the job with it.
_OWN = ("--array", "--chdir", "--error", "--ntasks", "--open-mode", "--output", "--parsable", "--wait", "--wrap",
        "-a", "-D", "-e", "-n", "-o", "-W")  # fmt: skip
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class SlurmOptions:
    """What the user wants of SLURM."""

    nodes: int | None
    workers_per_node: int | None
    time: str | None
    partition: str | None
    backup_before_s: int | None
    sbatch_args: tuple[str, ...]
    is_detached: bool


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options to those of `tfdistkit run`."""
    group = parser.add_argument_group(
        "with --backend slurm", "write a batch script, submit it, show its output, and cancel it on Ctrl-C"
    )
    add = group.add_argument
    add("--nnodes", type=int, metavar="N", help="how many nodes (default: SLURM decides)")
    told = "how many workers on each, instead of -np; also on this machine"
    add("--nproc-per-node", "--nproc_per_node", type=int, metavar="N", help=told)
    add("--time", metavar="LIMIT", help="the time limit, such as 1:30:00 or 2-00:00:00 (default: the partition's)")
    add("--partition", metavar="NAME", help="where to queue the job (default: SLURM's default partition)")
    add(
        "--backup-before",
        type=int,
        metavar="SECONDS",
        help="send SIGUSR1 so long before the time limit, for a backup; then the job is queued again",
    )
    add(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="any option of sbatch, such as --sbatch-arg=--gres=gpu:4; can be given several times",
    )
    add("--detach", action="store_true", help="submit, print the job's number, and end")


def read(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> SlurmOptions | None:
    """Takes the options out of what the parser found, and completes the number of workers there (`np`).

    Args:
        found: What the parser found.
        error: What to call with a mistake.

    Returns:
        The options, or None with another backend.
    """
    if found.backend != BACKEND:
        _refuse_all(found, error)
        return None
    _complete_workers(found, error)
    _check_counts(found, error)
    for word in found.sbatch_arg:
        problem = _problem(word)
        if problem:
            error(f"--sbatch-arg={word}: {problem}")
    if found.hosts is not None or found.hostfile is not None:
        error("SLURM chooses the hosts. Give --nnodes, or some of them by --sbatch-arg=--nodelist=n1,n2.")
    if found.timeout is not None:
        error("--timeout does not count the time in SLURM's queue. Give --time, which SLURM knows too.")
    wrong = [name for name, _ in found.env if not _VARIABLE.fullmatch(name)]
    if wrong:
        error(f"--env {wrong[0]}: no shell can set a variable of this name.")
    return SlurmOptions(
        nodes=found.nnodes,
        workers_per_node=found.nproc_per_node,
        time=found.time,
        partition=found.partition,
        backup_before_s=found.backup_before,
        sbatch_args=tuple(found.sbatch_arg),
        is_detached=found.detach,
    )


def _refuse_all(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> None:
    names = ("nnodes", "nproc_per_node", "time", "partition", "backup_before", "sbatch_arg", "detach")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(found, name)]
    if given:
        error(f"{given[0]} is for SLURM: add --backend slurm.")


def _check_counts(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> None:
    for least, names in (
        (1, ("np", "nnodes", "nproc_per_node", "backup_before", "threads_per_worker")),
        (0, ("ps", "max_restarts")),
    ):
        for name in names:
            value = getattr(found, name)
            if value is not None and value < least:
                error(f"-{'-' * (name != 'np')}{name.replace('_', '-')} is {value}. Expected: {least} or more.")


def _complete_workers(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> None:
    if found.nproc_per_node is None:
        return
    told = found.nproc_per_node * (found.nnodes or 1)
    if found.np is not None and found.np != told:
        error(f"-np {found.np} contradicts {found.nnodes or 1} nodes with {found.nproc_per_node} workers each.")
    found.np = told


def _problem(word: str) -> str:
    name, equals, _ = word.partition("=")
    if not word.startswith("-"):
        return "no option. Expected a form such as --sbatch-arg=--gres=gpu:4"
    if re.search(r"\s", name):
        return f"one word is one option. Expected --sbatch-arg={'='.join(word.split(None, 1))}"
    short = name[:2] if not name.startswith("--") else name
    return f"{short} is given by the launcher itself." if short in _OWN else ""
