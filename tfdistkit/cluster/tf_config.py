"""`TF_CONFIG`, TensorFlow's description of a cluster, from text and back.

The form: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG. Launchers add keys of their own
(Kubeflow's TFJob: `environment`; others: `rpc_layer`, `session_master`); they are left alone.
Every mistake is named here, before TensorFlow sees it: TensorFlow takes some of them silently and hangs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from tfdistkit.cluster.addresses import WILDCARD_HOSTS, host_key, split_address
from tfdistkit.cluster.spec import ROLES, TRAINING_ROLES, ClusterSpec, TaskSpec, local_place
from tfdistkit.errors import ClusterConfigError, explain, nearest

_EXAMPLE = '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}'
# A cluster with more processes of one role than this is a mistyped index, not a cluster.
_MOST_TASKS = 100_000


def to_tf_config(spec: ClusterSpec) -> str:
    """Writes a cluster in the form that TensorFlow reads from the environment variable TF_CONFIG.

    Args:
        spec: The cluster and this process's task in it.

    Returns:
        JSON on one line, roles in their fixed order; an empty string for a single process, for which
        TF_CONFIG is better unset.
    """
    if not spec.addresses:
        return ""
    task = json.dumps({"type": spec.task.role, "index": spec.task.index})
    return f'{{"cluster": {_cluster_to_json(tuple(spec.addresses.items()))}, "task": {task}}}'


@functools.lru_cache(maxsize=4)  # all processes of a job have the same
def _cluster_to_json(addresses: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    of_role = dict(addresses)
    return json.dumps({role: _tasks_to_json(of_role[role]) for role in ROLES if role in of_role})


def from_tf_config(text: str) -> ClusterSpec:
    """Reads a cluster from the text of TF_CONFIG, and checks all that can be checked without the network.

    An evaluator in the cluster is left out for every other process: it runs beside the training, and a
    process that waits for it would wait until it is started (kubeflow/trainer#1213).

    Args:
        text: The value of TF_CONFIG.

    Returns:
        The cluster, with the local rank derived from equal hosts in the address list.

    Raises:
        ClusterConfigError: one message for each kind of mistake.
    """
    content = _parse(text)
    addresses = _read_cluster(content)
    task = _read_task(content, addresses)
    _check_roles(addresses, task)
    _check_unique(addresses)
    _check_wildcards(addresses)
    if task.role != "evaluator":
        addresses.pop("evaluator", None)
    local_rank, local_world_size = local_place(addresses, task)
    return ClusterSpec(addresses, task, local_rank, local_world_size, source="TF_CONFIG")


def _tasks_to_json(addresses: tuple[str, ...]) -> list[str] | dict[str, str]:
    if all(addresses):
        return list(addresses)
    return {str(index): address for index, address in enumerate(addresses) if address}


def _error(what: str, received: Any, expected: str, do: str | None = None) -> ClusterConfigError:
    return ClusterConfigError(explain(what, received=received, expected=expected, do=do))


def _parse(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(f"TF_CONFIG is not JSON ({error}).", _shown(text), _EXAMPLE) from None
    if not isinstance(content, dict):
        raise _error("TF_CONFIG is JSON, but not an object.", _shown(text), _EXAMPLE)
    return content


def _read_cluster(content: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    cluster = content.get("cluster")
    if cluster is None and "sparseCluster" in content:
        # https://github.com/kubeflow/trainer, TFJob, `enableDynamicWorker`: TensorFlow itself does not read it either.
        raise _error(
            "TF_CONFIG tells each worker of itself and of the parameter servers only (`sparseCluster`).",
            _shown(json.dumps(content)),
            "all processes under `cluster`",
            "In the TFJob set `enableDynamicWorker: false`.",
        )
    if not isinstance(cluster, dict) or not any(cluster.values()):
        raise _error(
            "TF_CONFIG has no `cluster`, or an empty one.",
            _shown(json.dumps(content)),
            _EXAMPLE,
            "For a single process unset TF_CONFIG.",
        )
    for role in cluster:
        _check_role(role, "`cluster` in TF_CONFIG")
    return {role: _read_tasks(role, cluster[role]) for role in ROLES if cluster.get(role)}


def _check_role(role: Any, place: str) -> None:
    if role in ROLES:
        return
    expected = f"one of {', '.join(ROLES)}"
    if role == "master":
        raise _error(
            f"{place} has the role 'master' of TensorFlow 1.", "'master'", expected, "Rename 'master' to 'chief'."
        )
    hint = nearest(role.lower(), list(ROLES)) if isinstance(role, str) else ""
    raise _error(f"{place} has an unknown role.{hint}", repr(role), expected)


def _read_tasks(role: str, tasks: Any) -> tuple[str, ...]:
    """The addresses of one role: a list, or a sparse map `{"1": "host:port"}` whose gaps become empty strings."""
    if isinstance(tasks, list):
        listed = dict(enumerate(tasks))
    elif isinstance(tasks, dict):
        listed = {_read_index(key, f"`cluster.{role}` in TF_CONFIG"): address for key, address in tasks.items()}
    else:
        raise _error(f"`cluster.{role}` in TF_CONFIG is not a list.", repr(tasks), 'a list such as ["host1:12345"]')
    for index, address in listed.items():
        if not isinstance(address, str):
            place = f"`cluster.{role}[{index}]` in TF_CONFIG"
            raise _error(f"{place} is not an address.", repr(address), "host:port, such as 'host1:12345'")
        _split_address_of(role, index, address)
    return tuple(listed.get(index, "") for index in range(max(listed) + 1))


def _split_address_of(role: str, index: int, address: str) -> None:
    try:
        split_address(address)
    except ClusterConfigError as error:
        raise ClusterConfigError(f"`cluster.{role}[{index}]` in TF_CONFIG: {error}") from None


def _read_task(content: Mapping[str, Any], addresses: Mapping[str, tuple[str, ...]]) -> TaskSpec:
    task = content.get("task")
    expected = '"task": {"type": "worker", "index": 0}'
    if not isinstance(task, dict) or not task:
        do = "Give each process its own `task`: the same type as others, another index."
        raise _error("TF_CONFIG has no `task`.", _shown(json.dumps(content)), expected, do)
    if "type" not in task:
        raise _error("`task` in TF_CONFIG has no `type`.", json.dumps(task), expected)
    if "index" not in task:
        raise _error("`task` in TF_CONFIG has no `index`.", json.dumps(task), expected)
    role = task["type"]
    _check_role(role, "`task` in TF_CONFIG")
    index = _read_index(task["index"], "`task.index` in TF_CONFIG")
    listed = addresses.get(role, ())
    if role == "evaluator" and not listed:
        return TaskSpec(role, index)
    if not listed:
        known = ", ".join(repr(each) for each in addresses)
        raise _error(f"The task's role {role!r} is not in the cluster of TF_CONFIG.", repr(role), f"one of {known}")
    if index >= len(listed) or not listed[index]:
        places = ", ".join(str(place) for place, address in enumerate(listed) if address)
        raise _error(f"`task.index` in TF_CONFIG names no {role} of the cluster.", str(index), f"one of {places}")
    return TaskSpec(role, index)


def _read_index(value: Any, place: str) -> int:
    """An index: a number, or its digits (a key of a JSON object is always text)."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _error(f"{place} is not a number.", repr(value), "a whole number from 0")
    if not 0 <= value < _MOST_TASKS:
        raise _error(f"{place} is out of range.", str(value), f"a whole number from 0 to {_MOST_TASKS - 1}")
    return value


def _check_roles(addresses: Mapping[str, tuple[str, ...]], task: TaskSpec) -> None:
    for role in ("chief", "evaluator"):
        if len(addresses.get(role, ())) > 1:
            received = f"{len(addresses[role])} {role}s: {', '.join(addresses[role])}"
            do = "List the others as 'worker'." if role == "chief" else None
            raise _error(f"A cluster has at most one {role}.", received, f"one address under {role!r}", do)
        if task.role == role and task.index != 0:
            raise _error(f"The index of the {role} is not 0.", f"index {task.index}", "0: there is one of them")
    if not any(role in addresses for role in TRAINING_ROLES):
        received = f"roles {', '.join(addresses)}"
        raise _error("The cluster of TF_CONFIG trains nothing.", received, "at least one 'worker' or 'chief'")
    _check_servers(addresses)


def _check_servers(addresses: Mapping[str, tuple[str, ...]]) -> None:
    """Parameter servers alone train nothing: somebody coordinates, and somebody computes."""
    if "ps" not in addresses:
        return
    received = ", ".join(f"{len(listed)} {role}" for role, listed in addresses.items())
    if "worker" not in addresses:
        do = "List the workers; without any, take the servers out of the cluster."
        raise _error("The cluster of TF_CONFIG has parameter servers, but no worker.", received, "1 worker or more", do)
    if "chief" not in addresses:
        do = "Add a task of the type 'chief', which runs the same script: it is the one that runs `fit`."
        raise _error("The cluster of TF_CONFIG has parameter servers, but no chief.", received, "one 'chief'", do)


def _check_unique(addresses: Mapping[str, tuple[str, ...]]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for role, listed in addresses.items():
        for index, address in enumerate(listed):
            if not address:
                continue
            key = (host_key(address), split_address(address)[1])
            name = f"{role} {index}"
            if key in seen:
                do = "Give each process on a host its own port."
                raise _error(
                    f"Two tasks have one address: {seen[key]} and {name}.", repr(address), "an address for each", do
                )
            seen[key] = name


def _check_wildcards(addresses: Mapping[str, tuple[str, ...]]) -> None:
    """0.0.0.0 works as "this machine" only while everybody is on this machine."""
    hosts = {split_address(address)[0] for listed in addresses.values() for address in listed if address}
    wildcards = hosts & WILDCARD_HOSTS
    if wildcards and hosts - WILDCARD_HOSTS:
        raise _error(
            "An address in TF_CONFIG means 'all interfaces': nobody on another machine can reach it.",
            repr(sorted(wildcards)[0]),
            "a host name or address that every machine can reach",
        )


def _shown(text: str) -> str:
    """The text as it is put in a message: all of it if short, else its beginning."""
    return repr(text if len(text) <= 300 else text[:300] + "...")
