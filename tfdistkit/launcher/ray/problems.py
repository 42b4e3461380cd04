"""The errors of a job that Ray cannot start, each with a fix. Imports no Ray."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdistkit.errors import TfdistkitError, UnsupportedError, explain
from tfdistkit.launcher.backend import NoRoomError
from tfdistkit.launcher.ray.cluster import LOCAL


def error_of(refused: Mapping[str, Any]) -> TfdistkitError:
    """Returns the error for what the driver refuses.

    Args:
        refused: Its last line, see `driver.Refused`.
    """
    kind = refused["kind"]
    if kind == "address":
        return no_answer(refused["address"], refused["why"])
    if kind == "resources":
        return too_small(refused["asked"], refused["total"], refused["free"], refused["waited_s"])
    if kind == "connect":
        return no_connection(refused["address"], refused["why"])
    return NoRoomError(explain("Ray could not start the actors.", received=refused["why"]))


def no_answer(address: str, why: str) -> UnsupportedError:
    """Error: nothing listens at the address of the cluster."""
    return UnsupportedError(
        explain(
            "`--ray-address` (or RAY_ADDRESS) must be the address of a running Ray cluster.",
            received=f"{address}: {why}",
            do="Start one (ray start --head), correct the address, or let this machine start its own: "
            "--ray-address local.",
        )
    )


def no_connection(address: str, why: str) -> UnsupportedError:
    """Error: something listens at the address, but Ray cannot join the cluster, or start one."""
    return UnsupportedError(
        explain(
            f"Ray could not {'start a cluster' if address == LOCAL else f'connect to the cluster {address}'}.",
            received=why,
            do=f"Try it by hand: {Path(sys.executable).name} -c \"import ray; ray.init('{address}')\". The cluster "
            "must have this version of Ray and Python. If it asks for a token: export RAY_AUTH_MODE=token, and put its "
            "token into ~/.ray/auth_token.",
        )
    )


def too_small(
    asked: Mapping[str, float], total: Mapping[str, float], free: Mapping[str, float], waited_s: float
) -> NoRoomError:
    """Error: the cluster lacks resources, now or at all."""
    received = f"{_listed(asked)} for the workers; the cluster has {_listed(total)}"
    if free:
        received += f", free: {_listed(free)}"
    waited = f" within {waited_s:g} s (--start-timeout)" if waited_s else ""
    is_lacking = any(total[name] < amount for name, amount in asked.items())
    do = (
        "Start fewer workers (-np), let each reserve less (--cpus-per-worker 0.5, --gpus-per-worker), or add nodes to "
        "the cluster (ray start)."
        if is_lacking
        else "Wait until other jobs end (ray status lists what is used; --start-timeout SECONDS waits longer), or "
        "start fewer workers (-np). Each worker's share must fit on one node."
    )
    return NoRoomError(
        explain(f"The Ray cluster must have room for all workers at once{waited}.", received=received, do=do)
    )


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in resources.items())
