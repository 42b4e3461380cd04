"""The parts of a pod besides its processes: volumes, node selection, tolerations, secrets, service account.

Each is parsed from one word of the command line, and validated by the rules of Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdistkit.errors import OptionError, explain, nearest
from tfdistkit.launcher.kubernetes.quantities import check_memory

# RFC 1123: a DNS name, as required for most objects of a cluster.
_LABEL_CHARACTERS = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_NAME = re.compile(rf"{_LABEL_CHARACTERS}(\.{_LABEL_CHARACTERS})*")
_LONGEST_DNS_NAME = 253
# The name in a label's key, and a label's value.
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LONGEST_LABEL = 63

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

# The name of an environment variable, and the key of a value in a Secret.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")

# Kind -> the word between the kind and the path in the pod.
VOLUME_KINDS = {
    "pvc": "CLAIM",
    "configmap": "NAME",
    "secret": "NAME",
    "hostpath": "/ON/NODE",
    "emptydir": "",
    "memory": "SIZE",
}
# Only these kinds take `:ro`; the others are always read-only, or private to the pod.
_READ_ONLY_ALLOWED = ("pvc", "hostpath")


@dataclass(frozen=True)
class VolumeSpec:
    """A volume and its path in the pod.

    Args:
        kind: One of `VOLUME_KINDS`.
        source: Its source: a name, a path on the node, a size; empty for `emptydir`.
        path: Its mount path in the pod.
        is_read_only: Whether it is mounted read-only.
    """

    kind: str
    source: str
    path: str
    is_read_only: bool = False


@dataclass(frozen=True)
class TolerationSpec:
    """A tolerated taint of nodes: with any value if `value` is None, any effect if `effect` is None."""

    key: str
    value: str | None = None
    effect: str | None = None


@dataclass(frozen=True)
class SecretKey:
    """A value in a Secret of the cluster.

    Args:
        secret: The name of the Secret.
        key: The key of the value.
    """

    secret: str
    key: str


def parse_volume(text: str) -> VolumeSpec:
    """Parses a volume.

    Args:
        text: `KIND:SOURCE:/PATH`, with `:ro` appended for a read-only claim or folder of the node.

    Raises:
        OptionError: if the text has another form.
    """
    kind, *rest = text.split(":")
    if kind not in VOLUME_KINDS:
        what = f"`volume` must be one of: {_forms()}.{nearest(kind, list(VOLUME_KINDS))}"
        raise OptionError(explain(what, received=repr(text)))
    is_read_only = rest[-1:] == ["ro"]
    rest = rest[:-1] if is_read_only else rest
    if len(rest) != (2 if VOLUME_KINDS[kind] else 1):
        raise OptionError(explain(f"`volume` must have the form {_form(kind)}.", received=repr(text)))
    if is_read_only and kind not in _READ_ONLY_ALLOWED:
        what = f"`volume` must not end in `:ro` for the kind {kind!r}, which is not shared, or always read-only."
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
    """Parses a required label of nodes.

    Args:
        text: `KEY=VALUE`.

    Raises:
        OptionError: if the text has another form.
    """
    key, equals, value = text.partition("=")
    if not equals or not _is_key(key) or not _is_label(value):
        raise OptionError(
            explain(
                "`node_selector` must be a label of nodes: KEY=VALUE, such as disktype=ssd or "
                "cloud.google.com/gke-accelerator=nvidia-l4.",
                received=repr(text),
                do="List the labels: kubectl get nodes --show-labels",
            )
        )
    return key, value


def parse_toleration(text: str) -> TolerationSpec:
    """Parses a tolerated taint.

    Args:
        text: `KEY[=VALUE][:EFFECT]`.

    Raises:
        OptionError: if the text has another form.
    """
    rest, colon, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    if not _is_key(key) or not _is_label(value) or (colon and effect not in _EFFECTS):
        hint = nearest(effect, list(_EFFECTS)) if colon else ""
        raise OptionError(
            explain(
                f"`toleration` must be a taint of nodes: KEY or KEY=VALUE, with an optional :EFFECT, which is one of "
                f"{', '.join(_EFFECTS)}.{hint}",
                received=repr(text),
            )
        )
    return TolerationSpec(key, value if equals else None, effect if colon else None)


def parse_secret_variable(text: str) -> tuple[str, SecretKey]:
    """Parses a variable whose value is in a Secret.

    Args:
        text: `NAME=SECRET:KEY`.

    Returns:
        The name of the variable, and the key of its value.

    Raises:
        OptionError: if the text has another form.
    """
    name, _, source = text.partition("=")
    secret, colon, key = source.partition(":")
    if not _VARIABLE.fullmatch(name) or not colon or not _SECRET_KEY.fullmatch(key):
        raise OptionError(
            explain(
                "`env_from_secret` must be NAME=SECRET:KEY, such as WANDB_API_KEY=wandb:key.",
                # The value is not shown: it may be a secret, typed by mistake.
                received=f"{name!r}=..." if source else repr(name),
                do="Create a Secret: kubectl create secret generic wandb --from-literal=key=...",
            )
        )
    check_name("env_from_secret", secret)
    return name, SecretKey(secret, key)


def secret_variables(found: Mapping[str, SecretKey]) -> list[dict[str, Any]]:
    """Returns the variables of a container whose values are in Secrets.

    Args:
        found: Variable -> the key of its value.
    """
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
        for name, one in found.items()
    ]


def check_name(what: str, name: str) -> None:
    """Checks the name of a Kubernetes object.

    Args:
        what: The name of the option.
        name: The name of the object.

    Raises:
        OptionError: if the name is invalid.
    """
    if not _DNS_NAME.fullmatch(name) or len(name) > _LONGEST_DNS_NAME:
        message = f"`{what}` must be a name of a to z, 0 to 9, - and ., with a letter or a digit first and last."
        raise OptionError(explain(message, received=repr(name)))


def check_volumes(volumes: Sequence[VolumeSpec]) -> None:
    """Checks that the paths of volumes differ.

    Args:
        volumes: The volumes of one pod.

    Raises:
        OptionError: if two of them have the same path.
    """
    paths = [volume.path.rstrip("/") for volume in volumes]
    for path in paths:
        if paths.count(path) > 1:
            message = "Each `volume` must have its own path in the pod."
            raise OptionError(explain(message, received=f"{path} for {paths.count(path)} of them"))


def pod_fields(
    volumes: Sequence[VolumeSpec],
    node_selector: Mapping[str, str],
    tolerations: Sequence[TolerationSpec],
    service_account: str | None,
) -> dict[str, Any]:
    """Returns the fields of a pod's specification.

    Args:
        volumes: Its volumes.
        node_selector: The required labels of its node.
        tolerations: The tolerated taints of its node.
        service_account: Its service account; None for the namespace's default.
    """
    fields: dict[str, Any] = {
        "volumes": [{"name": f"volume-{number}", **_source(one)} for number, one in enumerate(volumes)],
        "nodeSelector": dict(node_selector),
        "tolerations": [_toleration(one) for one in tolerations],
        "serviceAccountName": service_account,
    }
    return {name: value for name, value in fields.items() if value}


def mounts(volumes: Sequence[VolumeSpec]) -> list[dict[str, Any]]:
    """Returns the mounts of a container for the volumes of `pod_fields`.

    Args:
        volumes: The volumes passed to `pod_fields`.
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
