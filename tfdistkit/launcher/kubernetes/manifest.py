"""Manifests for Kubernetes: a job's processes as pods that find each other. Plain data; nothing is asked of a cluster.

Every pod gets a TF_CONFIG. In an indexed Job and in a JobSet it is written here: the pods' names are known beforehand
(https://kubernetes.io/docs/concepts/workloads/controllers/job/, "Completion mode"), and a pod's own number, an
annotation, is put in by Kubernetes when it makes the variables. In a TFJob the training operator writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdistkit import env
from tfdistkit.errors import OptionError, explain, nearest
from tfdistkit.launcher.kubernetes.pod_parts import (
    SecretKey,
    TolerationSpec,
    VolumeSpec,
    check_name,
    check_volumes,
    mounts,
    pod_fields,
    secret_variables,
)
from tfdistkit.launcher.kubernetes.quantities import check_cores, check_memory

KINDS = ("job", "jobset", "tfjob")

_INDEX = "TFDISTKIT_INDEX"
_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_LABEL = "app.kubernetes.io/name"
# The operator looks for a container and a port of these names.
_TFJOB_CONTAINER = "tensorflow"
_TFJOB_PORT = "tfjob-port"

# RFC 1123: a label of a DNS name. Pods add a role and numbers to it, and 63 characters are allowed.
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST_NAME = 45


@dataclass(frozen=True)
class PodsSpec:
    """A job for Kubernetes as the user asked for it.

    Args:
        kind: One of `KINDS`.
        name: What it is called in the cluster.
        image: The container's image, with Python, TensorFlow, tfdistkit and the script.
        command: What each container runs.
        workers: How many workers.
        ps: How many parameter servers; with any, there is a coordinator besides.
        namespace: Where it is made; None for where `kubectl` puts it.
        port: The port of each process, in its own pod.
        gpus: How many NVIDIA GPUs each worker gets.
        cpus: How much processor time each container gets, as Kubernetes writes it.
        memory: How much memory each container gets, as Kubernetes writes it.
        max_restarts: How often everything is started again after a failure.
        env: Variables for the containers.
        secret_env: Variables whose values are in Secrets of the cluster.
        volumes: The volumes that all of them find.
        node_selector: The labels that a node must have.
        tolerations: The taints of nodes that the pods put up with.
        service_account: Who the pods are in the cluster; None for the namespace's default.
    """

    kind: str
    name: str
    image: str
    command: tuple[str, ...]
    workers: int
    ps: int = 0
    namespace: str | None = None
    port: int = 2222
    gpus: int = 0
    cpus: str | None = None
    memory: str | None = None
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[VolumeSpec, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[TolerationSpec, ...] = ()
    service_account: str | None = None
    secret_env: Mapping[str, SecretKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            what = f"`kind` is unknown.{nearest(self.kind, list(KINDS))}"
            raise OptionError(explain(what, received=repr(self.kind), expected=f"one of: {', '.join(KINDS)}"))
        for what, name in (("name", self.name), ("namespace", self.namespace or "default")):
            if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
                expected = f"up to {_LONGEST_NAME} of a to z, 0 to 9 and -, with a letter first and no - last"
                raise OptionError(
                    explain(f"`{what}` is no name in Kubernetes.", received=repr(name), expected=expected)
                )
        for what, count, least, most in (
            ("workers", self.workers, 1, None),
            ("ps", self.ps, 0, None),
            ("port", self.port, 1, 65535),
            ("gpus", self.gpus, 0, None),
            ("max_restarts", self.max_restarts, 0, None),
        ):
            if count < least or (most is not None and count > most):
                expected = f"{least} to {most}" if most else f"{least} or more"
                raise OptionError(explain(f"`{what}` is out of range.", received=str(count), expected=expected))
        self._check_pods()
        if self.ps and self.kind == "job":
            raise OptionError(
                explain(
                    "The pods of a Job are all alike, so there are no parameter servers among them.",
                    received=f"ps={self.ps}, kind='job'",
                    expected="`ps` with the kinds jobset or tfjob",
                )
            )

    def _check_pods(self) -> None:
        if self.cpus is not None:
            check_cores("cpus", self.cpus)
        if self.memory is not None:
            check_memory("memory", self.memory)
        if self.service_account is not None:
            check_name("service_account", self.service_account)
        check_volumes(self.volumes)
        for name in self.env.keys() & self.secret_env.keys():
            told = "A variable has a value, and one in a Secret too."
            raise OptionError(explain(told, received=name, expected="one of `env` and `env_from_secret`"))

    @property
    def roles(self) -> dict[str, int]:
        """How many processes there are of each role."""
        if not self.ps:
            return {"worker": self.workers}
        return {"chief": 1, "worker": self.workers, "ps": self.ps}


def manifests(job: PodsSpec) -> list[dict[str, Any]]:
    """Returns what `kubectl apply` makes of a job.

    Args:
        job: What the user wants.

    Returns:
        One or two objects of Kubernetes.
    """
    if job.kind == "tfjob":
        return [_tfjob(job)]
    return [_jobset(job)] if job.kind == "jobset" else [_service(job), _job(job)]


def _service(job: PodsSpec) -> dict[str, Any]:
    """Without an address of its own, it gives each pod a name."""
    spec = {
        "clusterIP": "None",
        # The processes look each other up before any of them is ready.
        "publishNotReadyAddresses": True,
        "selector": {_LABEL: job.name},
        "ports": [{"name": "tensorflow", "port": job.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _job(job: PodsSpec) -> dict[str, Any]:
    hosts = {"worker": [f"{job.name}-{index}.{job.name}" for index in range(job.workers)]}
    pod = _pod(job, "worker", _tf_config(job, hosts, "worker"))
    pod["spec"]["subdomain"] = job.name
    # A worker that fails takes the others with it, and all of them are counted.
    spec = _job_spec(pod, job.workers, job.max_restarts * job.workers)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}


def _jobset(job: PodsSpec) -> dict[str, Any]:
    hosts = {
        role: [f"{job.name}-{role}-0-{index}.{job.name}" for index in range(count)] for role, count in job.roles.items()
    }
    replicated = [
        {
            "name": role,
            "replicas": 1,
            "template": {"spec": _job_spec(_pod(job, role, _tf_config(job, hosts, role)), count, 0)},
        }
        for role, count in job.roles.items()
    ]
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.max_restarts},
        "replicatedJobs": replicated,
    }
    if job.ps:
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": ["chief"]}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(job), "spec": spec}


def _tfjob(job: PodsSpec) -> dict[str, Any]:
    names = {"chief": "Chief", "worker": "Worker", "ps": "PS"}
    replicas = {}
    for role, count in job.roles.items():
        pod = _pod(job, role, [])
        pod["spec"]["containers"][0] |= {
            "name": _TFJOB_CONTAINER,
            "ports": [{"name": _TFJOB_PORT, "containerPort": job.port}],
        }
        policy = "OnFailure" if job.max_restarts else "Never"
        # The operator decides on restarts, not the pod.
        del pod["spec"]["restartPolicy"]
        replicas[names[role]] = {"replicas": count, "restartPolicy": policy, "template": pod}
    spec = {
        "runPolicy": {"backoffLimit": job.max_restarts * sum(job.roles.values()), "cleanPodPolicy": "Running"},
        "tfReplicaSpecs": replicas,
    }
    return {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": _metadata(job), "spec": spec}


def _metadata(job: PodsSpec) -> dict[str, Any]:
    place = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": job.name, **place, "labels": {_LABEL: job.name}}


def _job_spec(pod: dict[str, Any], count: int, backoff_limit: int) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": backoff_limit,
        "template": pod,
    }


def _pod(job: PodsSpec, role: str, variables: list[dict[str, Any]]) -> dict[str, Any]:
    own = [{"name": name, "value": _literal(value)} for name, value in job.env.items()]
    own += secret_variables(job.secret_env)
    container: dict[str, Any] = {
        "name": "worker" if role == "worker" else role,
        "image": job.image,
        "command": [_literal(word) for word in job.command],
        "env": [{"name": env.UNBUFFERED, "value": "1"}, *own, *variables],
        "ports": [{"containerPort": job.port}],
    }
    limits = {
        **({"cpu": job.cpus} if job.cpus else {}),
        **({"memory": job.memory} if job.memory else {}),
        **({"nvidia.com/gpu": str(job.gpus)} if job.gpus and role == "worker" else {}),
    }
    if limits:
        container["resources"] = {"limits": limits}
    if job.volumes:
        container["volumeMounts"] = mounts(job.volumes)
    fields = pod_fields(job.volumes, job.node_selector, job.tolerations, job.service_account)
    spec = {"restartPolicy": "Never", "containers": [container], **fields}
    return {"metadata": {"labels": {_LABEL: job.name}}, "spec": spec}


def _tf_config(job: PodsSpec, hosts: Mapping[str, list[str]], role: str) -> list[dict[str, Any]]:
    cluster = {name: [f"{host}:{job.port}" for host in listed] for name, listed in hosts.items()}
    # Kubernetes puts the number in, which is no JSON before.
    text = json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})
    text = text.replace('"index": 0', f'"index": $({_INDEX})')
    return [
        {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}},
        {"name": env.TF_CONFIG, "value": text},
    ]


def _literal(text: str) -> str:
    """Kubernetes replaces `$(NAME)` in commands and variables; twice the dollar stands for itself."""
    return text.replace("$", "$$")
