"""The errors of a job that Ray cannot start, each with a fix. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdistkit.errors import TfdistkitError, UnsupportedError, explain

_TYPES = {"CPU": "CPUs", "GPU": "GPUs"}


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
    what = f"the connection to {refused['address']}" if kind == "connect" else "the start of the actors"
    return UnsupportedError(explain(f"Ray failed: {what}.", received=refused["why"]))


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


def too_small(
    asked: Mapping[str, float], total: Mapping[str, float], free: Mapping[str, float], waited_s: float
) -> UnsupportedError:
    """Error: the cluster lacks resources, now or at all."""
    received = f"{_listed(asked)} for the workers; the cluster has {_listed(total)}"
    if free:
        received += f", and {_listed(free)} of them are free"
    waited = f" within {waited_s:g} s (--start-timeout)" if waited_s else ""
    is_lacking = any(total[name] < amount for name, amount in asked.items())
    do = (
        "Start fewer workers (-np), let each reserve less (--cpus-per-worker 0.5, --gpus-per-worker), or add nodes to "
        "the cluster (ray start)."
        if is_lacking
        else "Wait until other jobs end (ray status lists what is used; --start-timeout SECONDS waits longer), or "
        "start fewer workers (-np). Each worker's share must fit on one node."
    )
    return UnsupportedError(
        explain(f"The Ray cluster must have room for all workers at once{waited}.", received=received, do=do)
    )


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {_TYPES.get(name, name)}" for name, amount in resources.items())
