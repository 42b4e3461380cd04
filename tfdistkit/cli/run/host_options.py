"""Defines the options for hosts, of `tfdistkit run` and `tfdistkit doctor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tfdistkit import env
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.cluster.environments.registry import allocated_hosts
from tfdistkit.errors import OptionError, TfdistkitError, explain
from tfdistkit.launcher.hosts import START_TIMEOUT_S, HostsSpec, parse_hosts, read_hostfile

# Options that need hosts: attribute, spelling.
_OF_HOSTS = (
    ("python", "--python"),
    ("working_dir", "--working-dir"),
    ("network_interface", "--network-interface"),
    ("ssh_port", "--ssh-port"),
    ("ssh_identity_file", "--ssh-identity-file"),
    ("start_timeout", "--start-timeout"),
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the parser of a command.

    Args:
        parser: The parser.
    """
    group = parser.add_argument_group("several hosts, by ssh")
    add = group.add_argument
    named = group.add_mutually_exclusive_group()
    add_named = named.add_argument
    add_named("-H", "--host", dest="hosts", metavar="H1:N,H2:N", help="hosts, and the number of workers on each")
    add_named("--hostfile", type=Path, metavar="FILE", help="a file with hosts: `H1 slots=N` on each line")
    add(
        "-x",
        dest="passed",
        type=_passed,
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for the workers, by default to its value in this shell; can be given several times",
    )
    add("--python", metavar="PATH", help="the path of Python on the hosts (default: the path of this one)")
    add("--working-dir", metavar="DIR", help="the working directory on the hosts (default: this one)")
    add(
        "--network-interface",
        metavar="NAME",
        help="the network interface of the workers on each host (default: the one that ssh connects to)",
    )
    add("--ssh-port", type=int, metavar="PORT", help="the port of sshd (default: from ssh's configuration)")
    add("--ssh-identity-file", metavar="FILE", help="the private key (default: from ssh's configuration)")
    add(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        help="timeout for the preflight check of the hosts (default: 30)",
    )


def read(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> HostsSpec | None:
    """Returns the hosts of the command line, or None.

    Args:
        found: The parsed options.
        error: Exits the command with a message.
    """
    try:
        slots = _of_each(found, _slots(found))
    except TfdistkitError as invalid:
        error(str(invalid))
    if slots is None:
        if getattr(found, "host_discovery_script", None) is not None:
            return None  # the script prints them
        for name, spelling in _OF_HOSTS:
            if getattr(found, name) is not None:
                error(f"{spelling} requires other hosts. Add -H HOST:SLOTS,... or --hostfile FILE.")
        return None
    try:
        return hosts_spec(found, slots)
    except OptionError as invalid:
        error(str(invalid))


def hosts_spec(found: argparse.Namespace, slots: tuple[HostSlots, ...]) -> HostsSpec:
    """Returns hosts, and how the options of the command line reach them.

    Args:
        found: The parsed options.
        slots: The hosts.

    Raises:
        OptionError: if an option is invalid.
    """
    return HostsSpec(
        slots=slots,
        python=found.python or sys.executable,
        folder=os.path.abspath(found.working_dir or os.getcwd()),
        interface=found.network_interface,
        ssh_port=found.ssh_port,
        ssh_identity_file=found.ssh_identity_file,
        start_timeout_s=START_TIMEOUT_S if found.start_timeout is None else found.start_timeout,
    )


def _slots(found: argparse.Namespace) -> tuple[HostSlots, ...] | None:
    """Returns the hosts that the user names; else several hosts that a scheduler allocated to this process."""
    if found.hosts is not None:
        return parse_hosts(found.hosts)
    if found.hostfile is not None:
        return read_hostfile(found.hostfile)
    if getattr(found, "host_discovery_script", None) is not None:
        return None
    allocated = allocated_hosts()
    return allocated if allocated is not None and len(allocated) > 1 else None


def _of_each(found: argparse.Namespace, slots: tuple[HostSlots, ...] | None) -> tuple[HostSlots, ...] | None:
    """Gives each host the workers of `--nproc-per-node`, where `--nnodes` counts hosts."""
    each = getattr(found, "slots_of_each", None)
    if slots is None or each is None:
        return slots
    for one in slots:
        if one.slots not in (1, each):
            raise OptionError(
                explain(
                    "--nproc-per-node must be the number of slots of each host.",
                    received=f"--nproc-per-node {each}, {one.host}:{one.slots}",
                    do="Name the hosts without slots, or use -np MIN:MAX, which counts workers.",
                )
            )
    return tuple(replace(one, slots=each) for one in slots)


def _passed(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE, received {text!r}")
    if equals:
        return name, value
    own = env.child_env({}).get(name)
    if own is None:
        raise argparse.ArgumentTypeError(f"there is no variable {name} in this shell; set it with -x {name}=VALUE")
    return name, own
