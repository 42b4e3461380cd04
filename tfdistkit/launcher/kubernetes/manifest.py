"""Kubernetes manifests: a job's processes as pods, each with a TF_CONFIG. Plain data; no access to a cluster.

For an indexed Job and a JobSet this module writes TF_CONFIG: the pods' names are known beforehand
(https://kubernetes.io/docs/concepts/workloads/controllers/job/, "Completion mode"), and Kubernetes inserts a pod's own
index, an annotation, when it sets the variables. For a TFJob the training operator writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdistkit import env
from tfdistkit.errors import OptionError, explain
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
from tfdistkit.validation import require_choice, require_integer

KINDS = ("job", "jobset", "tfjob")

_INDEX = "TFDISTKIT_INDEX"
_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_LABEL = "app.kubernetes.io/name"
# The operator requires a container and a port with these names.
_TFJOB_CONTAINER = "tensorflow"
_TFJOB_PORT = "tfjob-port"

# RFC 1123: a DNS label of at most 63 characters. Pod names append a role and numbers.
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST_NAME = 45


@dataclass(frozen=True)
class PodsSpec:
    """A Kubernetes job as the user requested it.

    Args:
        kind: One of `KINDS`.
        name: The job's name in the cluster.
        image: The container image, with Python, TensorFlow, tfdistkit and the script.
        command: The command of each container.
        workers: The number of workers.
        ps: The number of parameter servers; if positive, the job also has a coordinator.
        namespace: The namespace; None for that of `kubectl`.
        port: The port of each process, in its own pod.
        gpus: NVIDIA GPUs per worker.
        cpus: Processor time per container, as a Kubernetes quantity.
        memory: Memory per container, as a Kubernetes quantity.
        max_restarts: The number of restarts of the whole job after failures.
        env: Variables for the containers.
        secret_env: Variables whose values are in Secrets of the cluster.
        volumes: The volumes of every container.
        node_selector: The required labels of nodes.
        tolerations: The tolerated taints of nodes.
        service_account: The service account of the pods; None for the namespace's default.
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
        require_choice("kind", self.kind, KINDS)
        for what, name in (("name", self.name), ("namespace", self.namespace or "default")):
            if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
                message = (
                    f"`{what}` must be at most {_LONGEST_NAME} characters of a to z, 0 to 9 and -, with a letter first "
                    "and no - last."
                )
                raise OptionError(explain(message, received=repr(name)))
        require_integer("workers", self.workers)
        require_integer("ps", self.ps, at_least=0)
        require_integer("port", self.port, at_most=65535)
        require_integer("gpus", self.gpus, at_least=0)
        require_integer("max_restarts", self.max_restarts, at_least=0)
        self._check_pods()
        if self.ps and self.kind == "job":
            raise OptionError(
                explain(
                    "`ps` must be 0 with the kind 'job', whose pods are all workers.",
                    received=f"ps={self.ps}, kind='job'",
                    do="Use the kind jobset or tfjob.",
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
            message = "`env` and `env_from_secret` must not set the same variable."
            raise OptionError(explain(message, received=name, do="Leave out one of the two."))

    @property
    def roles(self) -> dict[str, int]:
        """The number of processes per role."""
        if not self.ps:
            return {"worker": self.workers}
        return {"chief": 1, "worker": self.workers, "ps": self.ps}


def manifests(job: PodsSpec) -> list[dict[str, Any]]:
    """Returns the objects of a job for `kubectl apply`.

    Args:
        job: The job.

    Returns:
        One or two Kubernetes objects.
    """
    if job.kind == "tfjob":
        return [_tfjob(job)]
    return [_jobset(job)] if job.kind == "jobset" else [_service(job), _job(job)]


def _service(job: PodsSpec) -> dict[str, Any]:
    """Returns a headless service, which gives each pod a DNS name."""
    spec = {
        "clusterIP": "None",
        # The processes resolve each other's names before any of them is ready.
        "publishNotReadyAddresses": True,
        "selector": {_LABEL: job.name},
        "ports": [{"name": "tensorflow", "port": job.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _job(job: PodsSpec) -> dict[str, Any]:
    hosts = {"worker": [f"{job.name}-{index}.{job.name}" for index in range(job.workers)]}
    pod = _pod(job, "worker", _tf_config(job, hosts, "worker"))
    pod["spec"]["subdomain"] = job.name
    # When one worker fails, all fail, and each failure counts.
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
        # The operator restarts pods; a pod must not set a policy of its own.
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
    # Kubernetes replaces $(...) with the index; before that, the text is not valid JSON.
    text = json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})
    text = text.replace('"index": 0', f'"index": $({_INDEX})')
    return [
        {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}},
        {"name": env.TF_CONFIG, "value": text},
    ]


def _literal(text: str) -> str:
    """Escapes `$`: Kubernetes replaces `$(NAME)` in commands and variables, and `$$` with `$`."""
    return text.replace("$", "$$")
