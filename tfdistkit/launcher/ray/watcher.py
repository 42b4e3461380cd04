"""Tells the launcher how many workers fit on each node of a Ray cluster, for as long as an elastic job runs.

In a process of its own, as the driver is: the drivers of a job end with its attempts, and this one does not. It reads
its task, a line of JSON, from stdin, and ends with stdin. It answers with lines of JSON on the descriptor in its
arguments.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group_table

from tfdistkit.launcher.ray import driver
from tfdistkit.launcher.ray.driver import name_of

_EVERY_S = 0.5
# Ray counts in parts of 1/10000.
_ROUNDING = 1e-4


def rooms(bundle: dict[str, float], group: str) -> list[tuple[str, int]]:
    """Returns the living nodes, each with the number of workers that fit: those of this job, and those in free space.

    Args:
        bundle: What one worker reserves.
        group: The beginning of the names of this job's placement groups.
    """
    own = _reserved(group)
    free = available_resources_per_node()
    listed = []
    for node in ray.nodes():
        if node["Alive"]:
            key = node["NodeID"]
            # Ray updates what is free a little after what is reserved, so the sum can be too much for a moment.
            there = min(own[key] + _fitting(bundle, free.get(key, {})), _fitting(bundle, node["Resources"]))
            listed.append((name_of(node), there))
    return listed


def _reserved(group: str) -> Counter[str]:
    """Returns the number of workers of this job on each node."""
    groups = [one for one in placement_group_table().values() if one["name"].startswith(group)]
    held = [one for one in groups if one["state"] not in ("REMOVED", "PENDING")]
    return Counter(node for one in held for node in one["bundles_to_node_id"].values())


def _fitting(bundle: dict[str, float], resources: dict[str, float]) -> int:
    return min(int((resources.get(name, 0.0) + _ROUNDING) / amount) for name, amount in bundle.items())


def _watch(task: dict[str, Any], tell: driver.Tell) -> None:
    driver.connect(task)
    look: Any = rooms
    if task["address"].startswith("ray://"):
        # Ray Client knows no resources of single nodes: a task in the cluster does.
        for module in (driver, sys.modules[__name__]):
            ray.cloudpickle.register_pickle_by_value(module)
        remote = ray.remote(num_cpus=0)(rooms)
        look = lambda *task: ray.get(remote.remote(*task))  # noqa: E731
    while True:
        tell("nodes", nodes=look(task["bundle"], task["group"]))
        time.sleep(_EVERY_S)


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # also while Ray connects, or does not answer


def run() -> None:
    """Runs until the launcher closes stdin, or the cluster does not answer."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    task = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    tell = driver.teller(int(sys.argv[1]))
    try:
        _watch(task, tell)
    except driver.Refused as refused:
        tell("refused", **refused.facts)
    except Exception as error:
        tell("refused", kind="connect", address=task["address"], why=driver.described(error))
    finally:
        os._exit(0)
