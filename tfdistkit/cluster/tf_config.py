"""Parses and writes `TF_CONFIG`, TensorFlow's description of a cluster.

The format: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG. Keys that launchers add (`environment` of
Kubeflow's TFJob, `rpc_layer`, `session_master`) are ignored. Errors are raised here, because TensorFlow accepts some
invalid values and hangs.
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
# A larger index is a typing error.
_MOST_TASKS = 100_000


def to_tf_config(spec: ClusterSpec) -> str:
    """Writes a cluster as a value of TF_CONFIG.

    Args:
        spec: The cluster and this process's task in it.

    Returns:
        JSON on one line, with roles in a fixed order; an empty string for a single process, which needs no
        TF_CONFIG.
    """
    if not spec.addresses:
        return ""
    task = json.dumps({"type": spec.task.role, "index": spec.task.index})
    return f'{{"cluster": {_cluster_to_json(tuple(spec.addresses.items()))}, "task": {task}}}'


@functools.lru_cache(maxsize=4)  # equal for all processes of a job
def _cluster_to_json(addresses: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    of_role = dict(addresses)
    return json.dumps({role: _tasks_to_json(of_role[role]) for role in ROLES if role in of_role})


def from_tf_config(text: str) -> ClusterSpec:
    """Parses the text of TF_CONFIG, and checks everything that needs no network.

    Removes the evaluator from the cluster of every other process: it does not train, and a process that waited for it
    would hang until it starts (kubeflow/trainer#1213).

    Args:
        text: The value of TF_CONFIG.

    Returns:
        The cluster, with the local rank derived from equal hosts in the address list.

    Raises:
        ClusterConfigError: if TF_CONFIG is invalid.
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
        raise _error(f"TF_CONFIG must be JSON ({error}).", _shown(text), _EXAMPLE) from None
    if not isinstance(content, dict):
        raise _error("TF_CONFIG must be a JSON object.", _shown(text), _EXAMPLE)
    return content


def _read_cluster(content: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    cluster = content.get("cluster")
    if cluster is None and "sparseCluster" in content:
        # https://github.com/kubeflow/trainer, TFJob, `enableDynamicWorker`: TensorFlow itself does not read it either.
        raise _error(
            "TF_CONFIG must list all processes, not a `sparseCluster`.",
            _shown(json.dumps(content)),
            "all processes in `cluster`",
            "Set `enableDynamicWorker: false` in the TFJob.",
        )
    if not isinstance(cluster, dict) or not any(cluster.values()):
        raise _error(
            "TF_CONFIG must have a `cluster` that is not empty.",
            _shown(json.dumps(content)),
            _EXAMPLE,
            "Unset TF_CONFIG for a single process.",
        )
    for role in cluster:
        _check_role(role, "`cluster` in TF_CONFIG")
    return {role: _read_tasks(role, cluster[role]) for role in ROLES if cluster.get(role)}


def _check_role(role: Any, part: str) -> None:
    if role in ROLES:
        return
    expected = f"one of {', '.join(ROLES)}"
    what = f"A role in {part} must be known."
    if role == "master":
        raise _error(what, "'master'", expected, "Rename 'master', a role of TensorFlow 1, to 'chief'.")
    hint = nearest(role.lower(), list(ROLES)) if isinstance(role, str) else ""
    raise _error(f"{what}{hint}", repr(role), expected)


def _read_tasks(role: str, tasks: Any) -> tuple[str, ...]:
    """Returns the addresses of one role, from a list or a sparse map `{"1": "host:port"}` (gaps: empty strings)."""
    if isinstance(tasks, list):
        listed = dict(enumerate(tasks))
    elif isinstance(tasks, dict):
        listed = {_read_index(key, f"`cluster.{role}` in TF_CONFIG"): address for key, address in tasks.items()}
    else:
        raise _error(f"`cluster.{role}` in TF_CONFIG must be a list.", repr(tasks), 'a list such as ["host1:12345"]')
    for index, address in listed.items():
        if not isinstance(address, str):
            what = f"`cluster.{role}[{index}]` in TF_CONFIG must be an address."
            raise _error(what, repr(address), "host:port, such as 'host1:12345'")
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
        do = "Set a `task` for each process: the same type, another index."
        raise _error("TF_CONFIG must have a `task`.", _shown(json.dumps(content)), expected, do)
    if "type" not in task:
        raise _error("`task` in TF_CONFIG must have a `type`.", json.dumps(task), expected)
    if "index" not in task:
        raise _error("`task` in TF_CONFIG must have an `index`.", json.dumps(task), expected)
    role = task["type"]
    _check_role(role, "`task` in TF_CONFIG")
    index = _read_index(task["index"], "`task.index` in TF_CONFIG")
    listed = addresses.get(role, ())
    if role == "evaluator" and not listed:
        return TaskSpec(role, index)
    if not listed:
        known = ", ".join(repr(each) for each in addresses)
        raise _error("`task.type` in TF_CONFIG must be a role of `cluster`.", repr(role), f"one of {known}")
    if index >= len(listed) or not listed[index]:
        known = ", ".join(str(number) for number, address in enumerate(listed) if address)
        what = f"`task.index` in TF_CONFIG must be the index of a {role} in `cluster`."
        raise _error(what, str(index), f"one of {known}")
    return TaskSpec(role, index)


def _read_index(value: Any, part: str) -> int:
    """Returns an index, from an integer or from digits (a key of a JSON object is always text)."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _error(f"{part} must be an integer >= 0.", repr(value), "such as 0")
    if not 0 <= value < _MOST_TASKS:
        raise _error(f"{part} must be an integer from 0 to {_MOST_TASKS - 1}.", str(value), "such as 0")
    return value


def _check_roles(addresses: Mapping[str, tuple[str, ...]], task: TaskSpec) -> None:
    for role in ("chief", "evaluator"):
        if len(addresses.get(role, ())) > 1:
            received = f"{len(addresses[role])} {role}s: {', '.join(addresses[role])}"
            do = "List the other ones as 'worker'." if role == "chief" else None
            raise _error(f"TF_CONFIG must have at most one {role}.", received, f"one address under {role!r}", do)
        if task.role == role and task.index != 0:
            raise _error(f"The index of the {role} must be 0.", f"index {task.index}", "0")
    if not any(role in addresses for role in TRAINING_ROLES):
        received = f"roles {', '.join(addresses)}"
        raise _error("`cluster` in TF_CONFIG must have a training role.", received, "at least one 'worker' or 'chief'")
    _check_servers(addresses)


def _check_servers(addresses: Mapping[str, tuple[str, ...]]) -> None:
    """Checks that a cluster with parameter servers has a coordinator (chief) and a worker."""
    if "ps" not in addresses:
        return
    received = ", ".join(f"{len(listed)} {role}" for role, listed in addresses.items())
    if "worker" not in addresses:
        do = "Add the workers, or remove the servers from `cluster`."
        raise _error("A cluster with parameter servers must have a worker.", received, "1 worker or more", do)
    if "chief" not in addresses:
        do = "Add a task of the type 'chief' that runs the same script: it runs `fit`."
        raise _error("A cluster with parameter servers must have a chief.", received, "one 'chief'", do)


def _check_unique(addresses: Mapping[str, tuple[str, ...]]) -> None:
    owners: dict[tuple[str, int], str] = {}
    for role, listed in addresses.items():
        for index, address in enumerate(listed):
            if not address:
                continue
            key = (host_key(address), split_address(address)[1])
            name = f"{role} {index}"
            if key in owners:
                do = "Give each process on a host its own port."
                what = f"The addresses of {owners[key]} and {name} must differ."
                raise _error(what, repr(address), "an address for each", do)
            owners[key] = name


def _check_wildcards(addresses: Mapping[str, tuple[str, ...]]) -> None:
    """Checks for wildcards beside other hosts: 0.0.0.0 works only if all processes are on this machine."""
    hosts = {split_address(address)[0] for listed in addresses.values() for address in listed if address}
    wildcards = hosts & WILDCARD_HOSTS
    if wildcards and hosts - WILDCARD_HOSTS:
        raise _error(
            "An address in TF_CONFIG must not be a wildcard ('all interfaces'): no other machine can connect to it.",
            repr(sorted(wildcards)[0]),
            "a host name or address that all machines can reach",
        )


def _shown(text: str) -> str:
    """Returns the text for a message, cut after 300 characters."""
    return repr(text if len(text) <= 300 else text[:300] + "...")
