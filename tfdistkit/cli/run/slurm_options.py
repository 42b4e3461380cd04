"""Defines and parses the options of `tfdistkit run --backend slurm`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from tfdistkit.cli.run.elastic_options import Bounds, bounds_of
from tfdistkit.launcher.slurm.batch_script import SlurmOptions

BACKEND = "slurm"

# Options of sbatch to refuse: the launcher sets them itself, or cannot follow the job with them.
_OWN = ("--array", "--chdir", "--error", "--ntasks", "--open-mode", "--output", "--parsable", "--wait", "--wrap",
        "-a", "-D", "-e", "-n", "-o", "-W")  # fmt: skip
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options to those of `tfdistkit run`."""
    group = parser.add_argument_group(
        "with --backend slurm", "write a batch script, submit it, show its output, and cancel it on Ctrl-C"
    )
    add = group.add_argument
    nodes = "the number of nodes, or MIN:MAX: as many as are free, after a loss too (default: SLURM decides)"
    add("--nnodes", type=_nodes, metavar="N", help=nodes)
    per_node = "the number of workers on each node, instead of -np; also here, and with --nnodes on hosts (-H)"
    add("--nproc-per-node", "--nproc_per_node", type=int, metavar="N", help=per_node)
    add("--time", metavar="LIMIT", help="the time limit, such as 1:30:00 or 2-00:00:00 (default: the partition's)")
    add("--partition", metavar="NAME", help="the partition of the job (default: SLURM's default partition)")
    add(
        "--backup-before",
        type=int,
        metavar="SECONDS",
        help="send SIGUSR1 this long before the time limit, for a backup; then requeue the job",
    )
    add(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="an option of sbatch, such as --sbatch-arg=--gres=gpu:4; can be given several times",
    )
    add("--detach", action="store_true", help="submit, print the job id, and exit")


def _nodes(text: str) -> int | Bounds:
    try:
        return bounds_of(text) or int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of nodes, or MIN:MAX, received {text!r}") from None


def read(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> SlurmOptions | None:
    """Returns the options for SLURM, and sets the number of workers (`np`) in the parsed options.

    Args:
        found: The parsed options.
        error: Exits the command with a message.

    Returns:
        The options, or None with another backend.
    """
    if found.backend != BACKEND:
        _refuse_all(found, error)
        return None
    least = _least_nodes(found, error)
    _complete_workers(found, error)
    _check_counts(found, error)
    for word in found.sbatch_arg:
        problem = _problem(word)
        if problem:
            error(f"--sbatch-arg={word}: {problem}")
    if found.hosts is not None or found.hostfile is not None:
        error("SLURM chooses the hosts. Use --nnodes, or --sbatch-arg=--nodelist=n1,n2.")
    if found.timeout is not None:
        error("--timeout does not work with SLURM. Use --time, the time limit of the job.")
    invalid = [name for name, _ in found.env if not _VARIABLE.fullmatch(name)]
    if invalid:
        error(f"the name in --env must consist of letters, digits and _. Received: {invalid[0]}.")
    return SlurmOptions(
        nodes=found.nnodes,
        least_nodes=least,
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
    if isinstance(found.nnodes, Bounds):
        error(
            "--nnodes MIN:MAX requires SLURM (--backend slurm) or hosts (-H, --hostfile, --host-discovery-script). On "
            "this machine alone give bounds for the workers: -np MIN:MAX."
        )
    if "--nproc-per-node" in given and found.np is not None:
        error("-np and --nproc-per-node are the same without SLURM: the number of workers. Write -np alone.")
    if given:
        error(f"{given[0]} is for SLURM: add --backend slurm.")


def _least_nodes(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> int | None:
    """Returns MIN of `--nnodes MIN:MAX`, and leaves MAX in the parsed options; None for a fixed number of nodes."""
    if not isinstance(found.nnodes, Bounds):
        return None
    least, most = found.nnodes
    if not 1 <= least <= most:
        error(f"MIN of --nnodes MIN:MAX must be >= 1, and at most MAX. Received: --nnodes {least}:{most}.")
    if found.np is not None:
        error("the number of workers follows from --nnodes MIN:MAX. Write --nproc-per-node N, and remove -np.")
    if found.ps:
        error("--nnodes MIN:MAX does not work with --ps: TensorFlow's coordinator knows a fixed list of workers.")
    found.nnodes, found.nproc_per_node = most, 1 if found.nproc_per_node is None else found.nproc_per_node
    return least


def _check_counts(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> None:
    for least, names in (
        (1, ("np", "nnodes", "nproc_per_node", "backup_before", "threads_per_worker")),
        (0, ("ps", "max_restarts")),
    ):
        for name in names:
            value = getattr(found, name)
            if value is not None and value < least:
                error(f"-{'-' * (name != 'np')}{name.replace('_', '-')} must be >= {least}. Received: {value}.")


def _complete_workers(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> None:
    if found.nproc_per_node is None:
        return
    total = found.nproc_per_node * (found.nnodes or 1)
    if found.np is not None and found.np != total:
        nodes = found.nnodes or 1
        error(f"-np must be {nodes} * {found.nproc_per_node} (--nnodes * --nproc-per-node). Received: {found.np}.")
    found.np = total


def _problem(word: str) -> str:
    name, equals, _ = word.partition("=")
    if not word.startswith("-"):
        return "it must be an option, such as --sbatch-arg=--gres=gpu:4."
    if re.search(r"\s", name):
        return f"it must be one word. Write --sbatch-arg={'='.join(word.split(None, 1))}"
    short = name[:2] if not name.startswith("--") else name
    return f"the launcher sets {short} itself. Remove it." if short in _OWN else ""
