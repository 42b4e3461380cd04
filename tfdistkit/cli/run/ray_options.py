"""Defines and parses the options of `tfdistkit run --backend ray`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import NoReturn

from tfdistkit.errors import OptionError
from tfdistkit.launcher.hosts import START_TIMEOUT_S
from tfdistkit.launcher.ray.cluster import RaySpec, chosen_address

BACKEND = "ray"

_OWN = (
    ("ray_address", "--ray-address"),
    ("cpus_per_worker", "--cpus-per-worker"),
    ("gpus_per_worker", "--gpus-per-worker"),
)
# Options that reach hosts, which Ray does itself.
_OF_SSH = (
    ("hosts", "-H"),
    ("hostfile", "--hostfile"),
    ("ssh_port", "--ssh-port"),
    ("ssh_identity_file", "--ssh-identity-file"),
    ("host_discovery_script", "--host-discovery-script"),
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options to those of `tfdistkit run`.

    Args:
        parser: The parser.
    """
    group = parser.add_argument_group("with --backend ray", "run each worker in an actor of a Ray cluster")
    add = group.add_argument
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="the cluster: HOST:PORT, ray://HOST:PORT, auto (one that runs here) or local (start one here); default: "
        "RAY_ADDRESS, else local",
    )
    add("--cpus-per-worker", type=float, metavar="N", help="CPUs that Ray reserves for each worker (default: 1)")
    add("--gpus-per-worker", type=float, metavar="N", help="GPUs that Ray reserves for each worker (default: 0)")


def read(found: argparse.Namespace, error: Callable[[str], NoReturn]) -> RaySpec | None:
    """Returns the Ray cluster of the command line; None with another backend.

    Args:
        found: The parsed options.
        error: Exits the command with a message.
    """
    if found.backend != BACKEND:
        for name, spelling in _OWN:
            if getattr(found, name) is not None:
                error(f"{spelling} is for Ray: add --backend ray.")
        return None
    for name, spelling in _OF_SSH:
        if getattr(found, name) is not None:
            error(f"Ray chooses the hosts, and needs no ssh. Remove {spelling}.")
    try:
        return RaySpec(
            slots=(),
            python=found.python or "",
            folder=os.path.abspath(found.working_dir or os.getcwd()),
            interface=found.network_interface,
            start_timeout_s=START_TIMEOUT_S if found.start_timeout is None else found.start_timeout,
            ray_address=chosen_address(found.ray_address),
            cpus=1.0 if found.cpus_per_worker is None else found.cpus_per_worker,
            gpus=found.gpus_per_worker or 0.0,
        )
    except OptionError as invalid:
        error(str(invalid))
