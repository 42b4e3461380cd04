"""Defines the options of `tfdistkit run` for jobs whose number of workers changes, and for preemption notices."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import NoReturn

from tfdistkit.cli.parser import path
from tfdistkit.cli.run import host_options
from tfdistkit.errors import OptionError
from tfdistkit.launcher.elasticity import COOL_DOWN_S, WAIT_S, ElasticSpec, PreemptionSpec
from tfdistkit.launcher.hosts import HostsSpec

# Options that need -np MIN:MAX: attribute, spelling.
_OF_ELASTIC_JOBS = (
    ("host_discovery_script", "--host-discovery-script"),
    ("cool_down", "--cool-down"),
    ("wait", "--wait"),
)
_RANGE = re.compile(r"(-?\d+):(-?\d+)", re.ASCII)
# Options of horovodrun and torchrun, and what to write.
_BOUNDS = "Write both bounds in one: -np MIN:MAX, such as -np 2:4."
_OF_OTHERS = {
    **dict.fromkeys(("--min-np", "--min-num-proc", "--max-np", "--max-num-proc"), _BOUNDS),
    **dict.fromkeys(("--min-nodes", "--max-nodes"), "Write --nnodes MIN:MAX --nproc-per-node N, or -np MIN:MAX."),
    "--reset-limit": "Use --max-restarts N: it counts failures, and neither lost workers nor planned changes.",
    "--elastic-timeout": "Use --wait SECONDS.",
    "--slots": "Give each host its slots: -H HOST:SLOTS.",
    "--slots-per-host": "Give each host its slots: -H HOST:SLOTS.",
    "--blacklist-cooldown-range": "Leave it out: a host that fails twice is left out for 60 s, then for longer.",
    **dict.fromkeys(
        ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank", "--master-addr")
        + ("--master-port", "--standalone"),
        "Leave it out: one launcher starts the workers on all hosts (-H HOST:SLOTS), and chooses their addresses.",
    ),
}


class Bounds(tuple[int, int]):
    """The value `MIN:MAX` of -np."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options to those of `tfdistkit run`.

    Args:
        parser: The parser.
    """
    group = parser.add_argument_group(
        "jobs that survive", "with -np MIN:MAX and BackupAndResume in the script, the number of workers may change"
    )
    add = group.add_argument
    add(
        "--host-discovery-script",
        metavar="PATH",
        help="a script that prints the hosts of now, as `host:slots` on each line; it runs every 2 seconds",
    )
    add(
        "--cool-down",
        type=float,
        metavar="SECONDS",
        help=f"the shortest time between a start of the workers and a growth (default: {COOL_DOWN_S:g})",
    )
    wait = f"how long to wait for room for MIN workers (default: {WAIT_S:g})"
    add("--wait", type=float, metavar="SECONDS", help=wait)
    window = "restarts longer ago do not count against --max-restarts (default: all count)"
    add("--restart-window", type=float, metavar="SECONDS", help=window)
    add(
        "--preemption-file",
        type=path,
        metavar="PATH",
        help="when this file appears, all ranks make a backup and end; hosts of the job in it: these alone leave",
    )
    add(
        "--preemption-command",
        metavar="COMMAND",
        help="the same when this command of the shell ends with 0; it runs every 5 seconds, and may print hosts",
    )


def bounds_of(text: str) -> Bounds | None:
    """Returns the bounds in the value of -np; None if it is not `MIN:MAX`.

    Args:
        text: The value.
    """
    found = _RANGE.fullmatch(text)
    return Bounds((int(found[1]), int(found[2]))) if found else None


def read(found: argparse.Namespace, hosts: HostsSpec | None, error: Callable[[str], NoReturn]) -> ElasticSpec | None:
    """Returns the bounds of an elastic job, and sets the number of workers (`np`) to the most.

    Args:
        found: The parsed options.
        hosts: The hosts of the job.
        error: Exits the command with a message.

    Returns:
        The bounds; None for a fixed number of workers.
    """
    if not isinstance(found.np, Bounds):
        for name, spelling in _OF_ELASTIC_JOBS:
            if getattr(found, name) is not None:
                error(f"{spelling} requires -np MIN:MAX, the fewest and the most workers, such as -np 2:4.")
        return None
    script = found.host_discovery_script
    if script is not None and hosts is not None:
        error("--host-discovery-script prints the hosts: it must be used without -H and --hostfile. Remove those.")
    if script is not None and not os.access(script, os.X_OK):
        why = "is not executable (chmod +x)" if os.path.isfile(script) else "does not exist"
        error(f"--host-discovery-script must be an executable file. Received: {script}, which {why}.")
    least, most = found.np
    found.np = most
    try:
        return ElasticSpec(
            least,
            most,
            discovery=None if script is None else os.path.abspath(script),
            remote=None if script is None else host_options.hosts_spec(found, ()),
            cool_down_s=COOL_DOWN_S if found.cool_down is None else found.cool_down,
            wait_s=WAIT_S if found.wait is None else found.wait,
        )
    except OptionError as invalid:
        error(str(invalid))


def count_by_nodes(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> None:
    """Turns the spelling of torchrun, `--nproc-per-node N` and `--nnodes MIN:MAX` of hosts, into `-np`.

    Args:
        found: The parsed options; it gets the number of workers (`np`), and their number on each host.
        error: Exits the command with a message.
    """
    has_hosts = any(one is not None for one in (found.hosts, found.hostfile, found.host_discovery_script))
    if found.np is None and (found.nnodes is None or (found.nnodes == 1 and not has_hosts)):
        found.np, found.nproc_per_node, found.nnodes = found.nproc_per_node, None, None
    if found.nnodes is None or found.np is not None or not has_hosts:
        return
    least, most = found.nnodes if isinstance(found.nnodes, Bounds) else (found.nnodes, found.nnodes)
    each = 1 if found.nproc_per_node is None else found.nproc_per_node
    if not 1 <= least <= most or each < 1:
        received = f"{least}:{most}" if isinstance(found.nnodes, Bounds) else least
        error(
            "--nnodes and --nproc-per-node must be >= 1, and MIN of --nnodes MIN:MAX at most MAX. "
            f"Received: --nnodes {received} --nproc-per-node {each}."
        )
    found.np = Bounds((least * each, most * each)) if isinstance(found.nnodes, Bounds) else most * each
    found.slots_of_each, found.nnodes, found.nproc_per_node = each, None, None


def preemption_of(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> PreemptionSpec | None:
    """Returns how preemption is announced; None without such an option.

    Args:
        found: The parsed options.
        error: Exits the command with a message.
    """
    if found.preemption_file is None and not found.preemption_command:
        return None
    try:
        return PreemptionSpec(found.preemption_file and found.preemption_file.absolute(), found.preemption_command)
    except OptionError as invalid:
        error(str(invalid))


def not_for_slurm(found: argparse.Namespace) -> str | None:
    """Returns the error message for options that a SLURM job does not have; None without them.

    Args:
        found: The parsed options.
    """
    if isinstance(found.np, Bounds):
        return (
            f"-np must be one number with --backend slurm. Received: -np {found.np[0]}:{found.np[1]}. Give bounds for "
            "the nodes: --nnodes MIN:MAX --nproc-per-node N. Inside an allocation (salloc, sbatch) use "
            "`tfdistkit run -np MIN:MAX` without --backend slurm."
        )
    for name in ("restart_window", "preemption_file", "preemption_command"):
        if getattr(found, name) is not None:
            return f"--{name.replace('_', '-')} does not work with --backend slurm. Use --backup-before SECONDS."
    return None


def of_others(option: str) -> str:
    """Returns what to write for an option of other launchers for hosts that come and go; empty for other options.

    Args:
        option: The option.
    """
    return _OF_OTHERS.get(option.replace("_", "-"), "")
