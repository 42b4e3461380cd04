"""The Ray driver of a job, in a process of its own: places actors, and carries bytes between the launcher and them.

In a process of its own, because Ray ends its driver when its node dies, and because it sets signal handlers. It reads
its task, a line of JSON, from stdin, and ends with stdin. It answers with lines of JSON on the descriptor in its
arguments: one for each phase, the last one `ready` or `refused`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tfdistkit.launcher.ray import actor as actor_module

# How long the address of a cluster may not answer: Ray itself would wait for minutes.
_ANSWER_S = 5.0
# The workers send little through Ray's object store; its smallest size is 75 MiB.
_STORE_BYTES = 100 * 1024 * 1024
_READ_BYTES = 65_536
# What Ray's own names leave of the 107 bytes of a socket's path.
_LONGEST_FOLDER_BYTES = 35
# Variables that Ray sets for the processes of an actor, and that would change the user's script.
_OF_RAY = ("PYTHONBREAKPOINT", "RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "TFDISTKIT_JOB_ID")
_DEAD = re.compile(
    r"(?:The actor is dead because|actor died because)\s+(.*?)(?:There are some|Some common causes|$)", re.DOTALL
)
_LONGEST_REASON = 300
# The label that Ray gives each node, and how much of its id names it to the user.
_NODE_LABEL = "ray.io/node-id"
_ID_DIGITS = 8

Tell = Callable[..., None]


class Refused(Exception):
    """The job cannot start.

    Args:
        kind: `address`, `connect`, `resources` or `actors`.
        **facts: What the launcher makes the error of.
    """

    def __init__(self, kind: str, **facts: Any):
        super().__init__(kind)
        self.facts = {"kind": kind, **facts}


def main(task: dict[str, Any], tell: Tell) -> None:
    """Places the actors of a job, and serves them until stdin ends.

    Args:
        task: What to do, see `driver_process.DriverProcess`.
        tell: Sends the launcher a line.
    """
    address = connect(task)
    tell("connected", address=address, version=ray.__version__)
    actors = _place(task)
    facts = _start_agents(actors, task)
    for one, (reading, writing, complaining) in zip(actors, task["descriptors"], strict=True):
        threading.Thread(target=_carry_in, args=(one, reading), daemon=True).start()
        threading.Thread(target=_carry_out, args=(one, writing, complaining), daemon=True).start()
    tell("ready", nodes=facts)


def name_of(node: dict[str, Any]) -> str:
    """Returns the name of a node: its host, and the beginning of its id, as a host may have several nodes.

    Args:
        node: One of `ray.nodes()`.
    """
    return f"{node['NodeManagerHostname']}/{node['NodeID'][:_ID_DIGITS]}"


def connect(task: dict[str, Any]) -> str:
    """Connects to the cluster, or starts it.

    Args:
        task: `address`, and `cores` for a cluster of the job's own.

    Returns:
        The address of the cluster.

    Raises:
        Refused: if that fails.
    """
    address = task["address"]
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "error"}
    if address == "local":
        options |= {
            "num_cpus": task["cores"],
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            **_folder_options(),
        }
    elif address != "auto":
        _require_answer(address)
    try:
        # Not RAY_ADDRESS: the launcher has read it, and it would win over `auto`.
        os.environ.pop("RAY_ADDRESS", None)
        ray.init(address=address, **options)
    except Exception as error:
        raise Refused("connect", address=address, why=described(error)) from error
    if address.startswith("ray://"):
        return str(address)
    return str(ray.get_runtime_context().gcs_address)


def _folder_options() -> dict[str, str]:
    """Returns the folder for Ray's sockets where TMPDIR is too long for their names (107 bytes in all)."""
    is_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER_BYTES
    return {"_temp_dir": "/tmp/ray"} if is_long else {}


def _require_answer(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise Refused("address", address=address, why=str(error)) from error


def _place(task: dict[str, Any]) -> list[Any]:
    """Reserves the resources of all processes at once, and creates an actor for each."""
    bundles = task["bundles"]
    asked = _sum(bundles)
    if task["address"] == "local" and not _fits(asked, ray.cluster_resources()):
        raise Refused("resources", asked=asked, total=_named(ray.cluster_resources(), asked), free={}, waited_s=0)
    group = placement_group(bundles, strategy="PACK", name=task["group"], bundle_label_selector=_selectors(task))
    if not group.wait(task["timeout_s"]):
        total, free = (_named(one, asked) for one in (ray.cluster_resources(), ray.available_resources()))
        raise Refused("resources", asked=asked, total=total, free=free, waited_s=task["timeout_s"])
    ray.cloudpickle.register_pickle_by_value(actor_module)
    remote = ray.remote(actor_module.AgentActor)
    actors = []
    for index, bundle in enumerate(bundles):
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        options = remote.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=where,
            max_restarts=0,
            max_concurrency=4,
        )
        actors.append(options.remote())
    return actors


def _selectors(task: dict[str, Any]) -> list[dict[str, str]] | None:
    """Returns what limits each process to the nodes that the task allows; None where it allows all."""
    if task["nodes"] is None:
        return None
    ids = [one["NodeID"] for one in ray.nodes() if one["Alive"] and name_of(one) in task["nodes"]]
    # Without one of them nothing fits: such a node does not exist.
    return [{_NODE_LABEL: f"in({','.join(ids or ['none'])})"}] * len(task["bundles"])


def _start_agents(actors: Sequence[Any], task: dict[str, Any]) -> list[dict[str, Any]]:
    asked = [one.start.remote(task["command"], _OF_RAY) for one in actors]
    try:
        facts = ray.get(asked, timeout=max(task["timeout_s"], _ANSWER_S))
    except Exception as error:
        raise Refused("actors", why=described(error)) from error
    names = {one["NodeID"]: name_of(one) for one in ray.nodes()}
    return [{**one, "node": names[one["node"]]} for one in facts]


def _carry_in(actor: Any, reading: int) -> None:
    """Carries the launcher's bytes to an agent."""
    with contextlib.suppress(Exception):  # the other direction tells why
        while data := os.read(reading, _READ_BYTES):
            ray.get(actor.write.remote(data))


def _carry_out(actor: Any, writing: int, complaining: int) -> None:
    """Carries an agent's bytes to the launcher; at the end says why, and closes the pipes."""
    try:
        while True:
            data, said, is_over = ray.get(actor.read.remote())
            _write(complaining, said)
            _write(writing, data)
            if is_over:
                _write(complaining, b"Its agent, a child of the actor, was killed.\n")
                break
    except BrokenPipeError:
        pass  # the launcher has closed this connection
    except Exception as error:
        with contextlib.suppress(OSError):
            _write(complaining, f"{_reason(error)}\n".encode())
    # In this order: the launcher takes the reason when the other pipe ends.
    os.close(complaining)
    os.close(writing)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _reason(error: BaseException) -> str:
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        # Ray tells later whether the node is dead. Bytes may be lost, so this connection is over.
        return f"The node of the actor does not answer: {_short(str(error).rpartition('unavailable: ')[2])}"
    found = _DEAD.search(str(error))
    return f"The actor died: {_short(found[1] if found else f'{type(error).__name__}: {error}')}"


def described(error: BaseException) -> str:
    """Returns an error of Ray with its cause, which often says more.

    Args:
        error: The error.
    """
    text = f"{type(error).__name__}: {_short(str(error))}"
    cause = error.__cause__ or error.__context__
    return text if cause is None else f"{text} ({type(cause).__name__}: {_short(str(cause))})"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _sum(bundles: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}


def _named(resources: dict[str, float], names: dict[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in names}


def _fits(asked: dict[str, float], there: dict[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in asked.items())


def teller(answers: int) -> Tell:
    """Returns a function that sends the launcher a line: what it is, and facts.

    Args:
        answers: The descriptor to write to.
    """

    def tell(what: str, **facts: Any) -> None:
        with contextlib.suppress(OSError):
            _write(answers, json.dumps({"is": what, **facts}).encode() + b"\n")

    return tell


def run() -> None:
    """Runs the driver until the launcher closes its stdin."""
    # Only the launcher ends the driver: Ctrl-C goes to the workers first.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answers = int(sys.argv[1])
    task = json.loads(sys.stdin.buffer.readline())

    tell = teller(answers)
    try:
        main(task, tell)
        sys.stdin.buffer.read()
    except Refused as refused:
        tell("refused", **refused.facts)
    except Exception as error:
        tell("refused", kind="connect", address=task["address"], why=described(error))
    finally:
        # Ends the actors, and a cluster that this process started.
        ray.shutdown()
        os._exit(0)
