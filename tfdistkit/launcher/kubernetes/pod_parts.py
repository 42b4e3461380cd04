"""What a pod of Kubernetes has besides its processes: volumes, the nodes it may run on, who it is in the cluster.

Each is read from one word of the command line, and checked as Kubernetes would check it, but before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdistkit.errors import OptionError, explain, nearest
from tfdistkit.launcher.kubernetes.quantities import check_memory

# RFC 1123: a name of the DNS, as most things in a cluster have one.
_LABEL_CHARACTERS = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_NAME = re.compile(rf"{_LABEL_CHARACTERS}(\.{_LABEL_CHARACTERS})*")
_LONGEST_DNS_NAME = 253
# The name in a label's key, and a label's value.
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LONGEST_LABEL = 63

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

# What the processes of a container can be told, and what a Secret can call a value.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")

# Kind -> what stands between it and the path in a pod.
VOLUME_KINDS = {
    "pvc": "CLAIM",
    "configmap": "NAME",
    "secret": "NAME",
    "hostpath": "/ON/NODE",
    "emptydir": "",
    "memory": "SIZE",
}
# A claim and a node's folder may be shared for reading only; the others are read-only, or a pod's own.
_READ_ONLY_ALLOWED = ("pvc", "hostpath")


@dataclass(frozen=True)
class VolumeSpec:
    """A volume and where a pod finds it.

    Args:
        kind: One of `VOLUME_KINDS`.
        source: What it is made of: a name, a path on the node, a size; empty for `emptydir`.
        path: Where it is in the pod.
        is_read_only: Whether it may only be read.
    """

    kind: str
    source: str
    path: str
    is_read_only: bool = False


@dataclass(frozen=True)
class TolerationSpec:
    """A taint of nodes that a pod puts up with: with any value if `value` is None, any effect if `effect` is None."""

    key: str
    value: str | None = None
    effect: str | None = None


@dataclass(frozen=True)
class SecretKey:
    """A value that the cluster keeps.

    Args:
        secret: The name of the Secret.
        key: Which of its values.
    """

    secret: str
    key: str


def parse_volume(text: str) -> VolumeSpec:
    """Reads a volume.

    Args:
        text: `KIND:SOURCE:/PATH`, with `:ro` behind it for a claim or a node's folder that is only read.

    Raises:
        OptionError: if it is none.
    """
    kind, *rest = text.split(":")
    if kind not in VOLUME_KINDS:
        what = f"`volume` is of no known kind.{nearest(kind, list(VOLUME_KINDS))}"
        raise OptionError(explain(what, received=repr(text), expected=f"one of: {_forms()}"))
    is_read_only = rest[-1:] == ["ro"]
    rest = rest[:-1] if is_read_only else rest
    if len(rest) != (2 if VOLUME_KINDS[kind] else 1):
        raise OptionError(explain("`volume` has another form.", received=repr(text), expected=_form(kind)))
    if is_read_only and kind not in _READ_ONLY_ALLOWED:
        what = f"A volume of the kind {kind!r} is not shared, or read-only anyway: there is no `:ro`."
        raise OptionError(explain(what, received=repr(text), expected=_form(kind)))
    *source, path = rest
    if not _is_path(path) or path == "/":
        raise OptionError(
            explain("The path of a `volume` in the pod must be absolute.", received=repr(text), expected=_form(kind))
        )
    volume = VolumeSpec(kind, "".join(source), path, is_read_only)
    _check_source(volume, text)
    return volume


def parse_node_selector(text: str) -> tuple[str, str]:
    """Reads a label that a node must have.

    Args:
        text: `KEY=VALUE`.

    Raises:
        OptionError: if it is none.
    """
    key, equals, value = text.partition("=")
    if not equals or not _is_key(key) or not _is_label(value):
        raise OptionError(
            explain(
                "`node_selector` is no label of a node.",
                received=repr(text),
                expected="KEY=VALUE, such as disktype=ssd or cloud.google.com/gke-accelerator=nvidia-l4",
                do="`kubectl get nodes --show-labels` shows those that there are.",
            )
        )
    return key, value


def parse_toleration(text: str) -> TolerationSpec:
    """Reads a taint that the pods put up with.

    Args:
        text: `KEY[=VALUE][:EFFECT]`.

    Raises:
        OptionError: if it is none.
    """
    rest, colon, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    if not _is_key(key) or not _is_label(value) or (colon and effect not in _EFFECTS):
        hint = nearest(effect, list(_EFFECTS)) if colon else ""
        raise OptionError(
            explain(
                f"`toleration` is no taint of a node.{hint}",
                received=repr(text),
                expected=f"KEY, KEY=VALUE or one of them with :EFFECT, which is one of {', '.join(_EFFECTS)}",
            )
        )
    return TolerationSpec(key, value if equals else None, effect if colon else None)


def parse_secret_variable(text: str) -> tuple[str, SecretKey]:
    """Reads a variable whose value is in a Secret.

    Args:
        text: `NAME=SECRET:KEY`.

    Returns:
        The variable, and where its value is.

    Raises:
        OptionError: if it is none.
    """
    name, _, source = text.partition("=")
    secret, colon, key = source.partition(":")
    if not _VARIABLE.fullmatch(name) or not colon or not _SECRET_KEY.fullmatch(key):
        raise OptionError(
            explain(
                "`env_from_secret` is no variable with a Secret's value.",
                # A value that was typed here by mistake is not repeated.
                received=f"{name!r}=..." if source else repr(name),
                expected="NAME=SECRET:KEY, such as WANDB_API_KEY=wandb:key",
                do="`kubectl create secret generic wandb --from-literal=key=...` makes one.",
            )
        )
    check_name("env_from_secret", secret)
    return name, SecretKey(secret, key)


def secret_variables(found: Mapping[str, SecretKey]) -> list[dict[str, Any]]:
    """Returns variables of a container whose values are in Secrets.

    Args:
        found: Variable -> where its value is.
    """
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
        for name, one in found.items()
    ]


def check_name(what: str, name: str) -> None:
    """Checks the name of something in the cluster.

    Args:
        what: The option.
        name: The name.

    Raises:
        OptionError: if nothing can be called so.
    """
    if not _DNS_NAME.fullmatch(name) or len(name) > _LONGEST_DNS_NAME:
        expected = "a to z, 0 to 9, - and ., with a letter or a digit first and last"
        raise OptionError(explain(f"`{what}` is no name in Kubernetes.", received=repr(name), expected=expected))


def check_volumes(volumes: Sequence[VolumeSpec]) -> None:
    """Checks that volumes do not stand in each other's way.

    Args:
        volumes: Those of one pod.

    Raises:
        OptionError: if two of them have one path.
    """
    paths = [volume.path.rstrip("/") for volume in volumes]
    for path in paths:
        if paths.count(path) > 1:
            told = f"Two of `volume` have the same path in the pod: {path}."
            raise OptionError(explain(told, received=f"{paths.count(path)} of them", expected="a path for each"))


def pod_fields(
    volumes: Sequence[VolumeSpec],
    node_selector: Mapping[str, str],
    tolerations: Sequence[TolerationSpec],
    service_account: str | None,
) -> dict[str, Any]:
    """Returns what stands in a pod's specification for these.

    Args:
        volumes: Its volumes.
        node_selector: The labels of its node.
        tolerations: The taints of its node.
        service_account: Who it is in the cluster; None for the namespace's default.
    """
    fields: dict[str, Any] = {
        "volumes": [{"name": f"volume-{number}", **_source(one)} for number, one in enumerate(volumes)],
        "nodeSelector": dict(node_selector),
        "tolerations": [_toleration(one) for one in tolerations],
        "serviceAccountName": service_account,
    }
    return {name: value for name, value in fields.items() if value}


def mounts(volumes: Sequence[VolumeSpec]) -> list[dict[str, Any]]:
    """Returns where a container finds the volumes of `pod_fields`.

    Args:
        volumes: The same.
    """
    return [
        {
            "name": f"volume-{number}",
            "mountPath": one.path,
            **({"readOnly": True} if one.is_read_only or one.kind in ("configmap", "secret") else {}),
        }
        for number, one in enumerate(volumes)
    ]


def _source(volume: VolumeSpec) -> dict[str, Any]:
    if volume.kind == "pvc":
        read_only = {"readOnly": True} if volume.is_read_only else {}
        return {"persistentVolumeClaim": {"claimName": volume.source, **read_only}}
    if volume.kind == "configmap":
        return {"configMap": {"name": volume.source}}
    if volume.kind == "secret":
        return {"secret": {"secretName": volume.source}}
    if volume.kind == "hostpath":
        return {"hostPath": {"path": volume.source}}
    return {"emptyDir": {"medium": "Memory", "sizeLimit": volume.source} if volume.kind == "memory" else {}}


def _toleration(one: TolerationSpec) -> dict[str, str]:
    value = {"operator": "Exists"} if one.value is None else {"operator": "Equal", "value": one.value}
    return {"key": one.key, **value, **({"effect": one.effect} if one.effect is not None else {})}


def _check_source(volume: VolumeSpec, text: str) -> None:
    if volume.kind in ("pvc", "configmap", "secret"):
        check_name("volume", volume.source)
    elif volume.kind == "memory":
        check_memory("volume", volume.source)
    elif volume.kind == "hostpath" and not _is_path(volume.source):
        what = "The path of a `volume` on the node must be absolute, without `..`."
        raise OptionError(explain(what, received=repr(text), expected=_form("hostpath")))


def _is_path(path: str) -> bool:
    return path.startswith("/") and ".." not in path.split("/") and path.isprintable()


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (not _DNS_NAME.fullmatch(prefix) or len(prefix) > _LONGEST_DNS_NAME):
        return False
    return bool(_LABEL.fullmatch(name)) and len(name) <= _LONGEST_LABEL


def _is_label(value: str) -> bool:
    return value == "" or (bool(_LABEL.fullmatch(value)) and len(value) <= _LONGEST_LABEL)


def _form(kind: str) -> str:
    between = f":{VOLUME_KINDS[kind]}" if VOLUME_KINDS[kind] else ""
    return f"{kind}{between}:/PATH{'[:ro]' if kind in _READ_ONLY_ALLOWED else ''}"


def _forms() -> str:
    return ", ".join(map(_form, VOLUME_KINDS))
