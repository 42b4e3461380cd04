"""`tfdistkit k8s manifest`: valid for Kubernetes, and the right environment in each pod."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tfdistkit.cli.main import main
from tfdistkit.cluster import ClusterSpec, detect_cluster
from tfdistkit.launcher.kubernetes.yaml_text import to_yaml

SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "kubernetes_schemas.json").read_text())
NASTY = 'it\'s "$(HOME)" $HOME $$ # \\ é \U0001f600 \x07 two\nlines: - no'


def written(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["k8s", "manifest", "--image", "registry.example/train:1.2", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def strict(schema: Any) -> Any:
    """A schema that allows no other members than it names, as `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(part) for name, part in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema and not isinstance(schema["properties"], str):
        closed["additionalProperties"] = False
    return closed


def mistakes(manifest: dict[str, Any]) -> list[str]:
    schema = {**strict(SCHEMAS[manifest["kind"]]), "$defs": strict(SCHEMAS["$defs"])}
    return [f"{one.json_path}: {one.message}" for one in jsonschema.Draft7Validator(schema).iter_errors(manifest)]


def pods(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """The pods that Kubernetes makes: their names in the DNS, their specification, their variables."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    if manifest["kind"] == "Job":
        jobs = [(name, spec)]
        subdomain = spec["template"]["spec"]["subdomain"]
    else:
        jobs = [(f"{name}-{one['name']}-0", one["template"]["spec"]) for one in spec["replicatedJobs"]]
        subdomain = name
    for job, template in jobs:
        assert template["completionMode"] == "Indexed" and template["completions"] == template["parallelism"]
        for index in range(template["completions"]):
            pod = template["template"]["spec"]
            yield f"{job}-{index}.{subdomain}", pod, variables(pod["containers"][0]["env"], index)


def variables(listed: list[dict[str, Any]], index: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in listed:
        if "valueFrom" in one:
            assert one["valueFrom"]["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
            found[one["name"]] = str(index)
        else:
            found[one["name"]] = expand(one["value"], found)
    return found


def expand(text: str, known: dict[str, str]) -> str:
    """What Kubernetes makes of `$(NAME)` and `$$`, when NAME was defined before."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else known.get(m[1] or "", m[0]), text)


@pytest.mark.parametrize(
    "words",
    [
        ("-np", "3", "train.py"),
        ("--kind", "job", "-np", "1", "--gpus", "2", "--cpus", "500m", "--memory", "16Gi", "-m", "package.train"),
        ("--kind", "job", "-np", "2", "--namespace", "team", "--name", "a-b", "--max-restarts", "3", "train.py", "-x"),
        ("--kind", "jobset", "-np", "3", "--max-restarts", "2", "train.py"),
        ("--kind", "jobset", "-np", "3", "--ps", "2", "--gpus", "1", "--port", "1234", "train.py"),
        ("--kind", "tfjob", "-np", "3", "--env", "A=1", "train.py"),
        ("--kind", "tfjob", "-np", "2", "--ps", "1", "--memory", "1Gi", "--max-restarts", "1", "train.py"),
    ],
)
def test_manifests_match_the_published_schemas(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    made = written(capsys, *words)
    assert [mistakes(manifest) for manifest in made] == [[]] * len(made)


def test_the_schemas_reject_invalid_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, path, problem in (
        ("job", "backoffLimit", "is not of type 'integer'"),
        ("job", "compeltions", "'compeltions' was unexpected"),
        ("jobset", "failurePolicy", "is not of type 'object'"),
        ("jobset", "replicatedJob", "'replicatedJob' was unexpected"),
        ("tfjob", "runPolicy", "is not of type 'object'"),
        ("tfjob", "tfReplicaSpec", "'tfReplicaSpec' was unexpected"),
    ):
        manifest = written(capsys, "--kind", kind, "-np", "2", "train.py")[-1]
        manifest["spec"][path] = "two"
        assert any(problem in one for one in mistakes(manifest)), (path, mistakes(manifest))


@pytest.mark.parametrize(("kind", "ps"), [("job", 0), ("jobset", 0), ("jobset", 2)])
def test_each_pod_gets_its_task(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str, ps: int
) -> None:
    *services, manifest = written(capsys, "--kind", kind, "-np", "3", "--ps", str(ps), "--port", "4321", "train.py")
    found: list[ClusterSpec] = []
    for host, pod, variables in pods(manifest):
        monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])
        cluster = detect_cluster()
        assert cluster.address == f"{host}:4321"
        assert pod["containers"][0]["ports"] == [{"containerPort": 4321}]
        found.append(cluster)
    assert len(found) == (3 if not ps else 1 + 3 + ps)
    assert all(cluster.addresses == found[0].addresses for cluster in found)
    assert [cluster.rank for cluster in found if cluster.task.role == "worker"] == [0, 1, 2]
    if kind == "job":
        (service,) = services
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert service["metadata"]["name"] == manifest["spec"]["template"]["spec"]["subdomain"]
        assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    else:
        assert services == []


def test_a_tfjob_has_the_names_its_operator_requires(capsys: pytest.CaptureFixture[str]) -> None:
    (manifest,) = written(capsys, "--kind", "tfjob", "-np", "3", "--ps", "2", "--gpus", "1", "train.py")
    replicas = manifest["spec"]["tfReplicaSpecs"]
    assert {role: one["replicas"] for role, one in replicas.items()} == {"Chief": 1, "Worker": 3, "PS": 2}
    for role, one in replicas.items():
        (container,) = one["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        assert container["ports"] == [{"name": "tfjob-port", "containerPort": 2222}]
        assert "TF_CONFIG" not in [variable["name"] for variable in container["env"]]
        assert ("resources" in container) == (role == "Worker")


@pytest.mark.parametrize("kind", ["job", "jobset", "tfjob"])
def test_values_of_secrets_stay_in_the_cluster(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    words = ["--env-from-secret", "API_KEY=wandb:key", "--env-from-secret", "TFDISTKIT_SECRET=train:secret.hex"]
    made = written(capsys, "--kind", kind, "-np", "2", *words, "train.py")
    assert [mistakes(manifest) for manifest in made] == [[]] * len(made)
    text = json.dumps(made)
    for name, secret, key in (("API_KEY", "wandb", "key"), ("TFDISTKIT_SECRET", "train", "secret.hex")):
        entry = {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        assert json.dumps(entry) in text


def test_a_secret_in_the_manifest_causes_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "API_KEY=abc123", "--env", "DB=mysql://me:abc123@db/x", "--env", "SEED=7"]
    assert main(["k8s", "manifest", "--image", "i", "-np", "2", *words, "train.py"]) == 0
    captured = capsys.readouterr()
    assert [line.split()[9] for line in captured.err.splitlines()] == ["API_KEY", "DB"] and "abc123" not in captured.err
    assert "--env-from-secret API_KEY=SECRET:KEY" in captured.err
    assert "abc123" in captured.out, "it is what was asked for"


@pytest.mark.parametrize("kind", ["job", "jobset", "tfjob"])
def test_words_and_variables_reach_the_script_unchanged(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    script = ("train.py", NASTY, "--", "yes", "1")
    words = ("--kind", kind, "-np", "2", "--name", "x", "--env", f"NASTY={NASTY}", *script)
    found = list(containers(written(capsys, *words)[-1]))
    for container in found:
        command = [expand(word, {"HOME": "wrong"}) for word in container["command"]]
        assert command == ["python", *script]
        variables = {one["name"]: one.get("value", "") for one in container["env"]}
        assert expand(variables["NASTY"], {"HOME": "wrong"}) == NASTY
    assert found


def containers(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield from part.get("containers", [])
        part = list(part.values())
    if isinstance(part, list):
        for one in part:
            yield from containers(one)


@pytest.mark.parametrize(
    "value",
    [
        {"a": {}, "b": [], "c": "", "d": [[1, [2]], {"e": [{"f": "g", "h": "i"}]}]},
        ["true", "No", "null", "~", "1", "1.5", "0x1", "1e3", "2001-01-01", "-", "- a", "a: b", "a #b", "#", "&a"],
        {"yes": True, "a b": False, "": -1, "'": '"', "\\": "\t\r\x85\u2028"},
        NASTY,
    ],
)
@pytest.mark.parametrize("has_yaml", [True, False])
def test_yaml_round_trip(monkeypatch: pytest.MonkeyPatch, value: object, has_yaml: bool) -> None:
    if not has_yaml:
        monkeypatch.setitem(sys.modules, "yaml", None)
    assert yaml.safe_load(to_yaml(value)) == value


def test_yaml_is_what_kubernetes_reads_and_people_write() -> None:
    same = ["a"]
    text = to_yaml({"args": ["y", "N", "yes", "on", "1e3", "x"], "one": same, "two": same})
    lines = ["args:", "  - 'y'", "  - 'N'", "  - 'yes'", "  - 'on'", "  - '1e3'", "  - x"]
    assert text.splitlines() == [*lines, "one:", "  - a", "two:", "  - a"]


PODS = (
    *("--volume", "pvc:data:/data:ro", "--volume", "memory:8Gi:/dev/shm", "--volume", "emptydir:/scratch"),
    *("--volume", "secret:keys:/keys", "--volume", "configmap:a.b:/settings", "--volume", "hostpath:/mnt/a:/b"),
    *("--node-selector", "disktype=ssd", "--node-selector", "example.com/zone=a_1"),
    *("--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "team=vision", "--service-account", "trainer"),
)


@pytest.mark.parametrize("kind", ["job", "jobset", "tfjob"])
def test_all_pods_have_the_volumes_and_node_rules(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    roles = () if kind == "job" else ("--ps", "1")
    made = written(capsys, "--kind", kind, "-np", "2", *roles, *PODS, "train.py")
    assert [mistakes(manifest) for manifest in made] == [[]] * len(made)
    found = list(specifications(made[-1]))
    assert len(found) == (1 if kind == "job" else 3)
    for pod in found:
        sources = {one["name"]: one for one in pod["volumes"]}
        (container,) = pod["containers"]
        by_path = {
            one["mountPath"]: (one.get("readOnly", False), sources[one["name"]]) for one in container["volumeMounts"]
        }
        options = {
            path: (read_only, {k: v for k, v in one.items() if k != "name"})
            for path, (read_only, one) in by_path.items()
        }
        assert options == {
            "/data": (True, {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}}),
            "/dev/shm": (False, {"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}),
            "/scratch": (False, {"emptyDir": {}}),
            "/keys": (True, {"secret": {"secretName": "keys"}}),
            "/settings": (True, {"configMap": {"name": "a.b"}}),
            "/b": (False, {"hostPath": {"path": "/mnt/a"}}),
        }
        assert pod["nodeSelector"] == {"disktype": "ssd", "example.com/zone": "a_1"}
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "team", "operator": "Equal", "value": "vision"},
        ]
        assert pod["serviceAccountName"] == "trainer"


def specifications(part: Any) -> Iterator[dict[str, Any]]:
    """All pods' specifications in a manifest."""
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        part = list(part.values())
    if isinstance(part, list):
        for one in part:
            yield from specifications(one)


@pytest.mark.parametrize("nasty", ["/a\nb: c", "/a: {b", "/- a", "/a #b", "/'a\"", "/\u2028", "/$(HOME)"])
def test_a_path_is_quoted(capsys: pytest.CaptureFixture[str], nasty: str) -> None:
    words = ("k8s", "manifest", "--image", "i", "-np", "1", "--volume", f"hostpath:{nasty}:/b", "train.py")
    if main(list(words)) == 2:
        captured = capsys.readouterr()
        assert captured.out == "" and "`volume`" in captured.err
        return
    *_, manifest = yaml.safe_load_all(capsys.readouterr().out)
    (pod,) = specifications(manifest)
    assert pod["volumes"] == [{"name": "volume-0", "hostPath": {"path": nasty}}]


def test_unused_pod_parts_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    (pod,) = specifications(written(capsys, "-np", "1", "train.py")[-1])
    assert set(pod) == {"restartPolicy", "containers", "subdomain"}
    assert "volumeMounts" not in pod["containers"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-np", "2"), "no script is given"),
        (("-np", "0", "train.py"), "`workers` must be an integer >= 1. Received: workers=0"),
        (
            ("-np", "2", "--port", "70000", "train.py"),
            "`port` must be an integer from 1 to 65535. Received: port=70000",
        ),
        (("-np", "2", "--name", "Train", "train.py"), "with a letter first and no - last. Received: 'Train'"),
        (("-np", "2", "--name", "x" * 46, "train.py"), "`name` must be at most 45 characters of a to z"),
        (("-np", "2", "--namespace", "a_b", "train.py"), "`namespace` must be at most 45 characters of a to z"),
        (("-np", "2", "--ps", "1", "train.py"), "Use the kind jobset or tfjob."),
        (("-np", "2", "--env", "=1", "train.py"), "expected NAME=VALUE"),
        (("-np", "2", "--kind", "pod", "train.py"), "invalid choice: 'pod'"),
        (("--memory", "16GB"), "Received: '16GB'. Expected: 16Gi (1024^3 bytes each) or 16G (1000^3).\nWrite 16Gi."),
        (("--memory", "16 gb"), "Write 16Gi."),
        (("--memory", "16GiB"), "Received: '16GiB'. Expected: 16Gi.\nWrite 16Gi."),
        (("--memory", "100K"), "Expected: 100Ki (1024^1 bytes each) or 100k (1000^1)"),
        (("--memory", "512m"), "Write 512Mi."),
        (
            ("--memory", "16"),
            "`memory` must have a unit: Kubernetes reads a plain number as bytes. Received: '16'.\nWrite 16Gi",
        ),
        (("--memory", "0Gi"), "or 16G (1000^3 bytes each). Received: '0Gi'"),
        (("--memory", "16Gi\nb: c"), "`memory` must be a number with a unit, such as 16Gi"),
        (("--cpus", "4 cores"), "such as 500m. Received: '4 cores'"),
        (("--cpus", "0m"), "`cpus` must be a number of cores"),
        (("--volume", "pcv:data:/data"), "Did you mean 'pvc'? Received: 'pcv:data:/data'"),
        (("--volume", "pvc:data"), "`volume` must have the form pvc:CLAIM:/PATH[:ro]. Received: 'pvc:data'"),
        (("--volume", "pvc:data:data"), "The path of a `volume` in the pod must be absolute"),
        (("--volume", "pvc:Data:/data"), "with a letter or a digit first and last. Received: 'Data'"),
        (("--volume", "secret:s:/s:ro"), "`volume` must not end in `:ro` for the kind 'secret'"),
        (("--volume", "hostpath:../x:/x"), "The path of a `volume` on the node must be absolute, without `..`"),
        (("--volume", "hostpath:/a/../etc:/x"), "without `..`"),
        (("--volume", "memory:8GB:/dev/shm"), "Write 8Gi."),
        (
            ("--volume", "emptydir:/a", "--volume", "emptydir:/a/"),
            "Each `volume` must have its own path in the pod. Received: /a",
        ),
        (
            ("--node-selector", "disktype"),
            "such as disktype=ssd or cloud.google.com/gke-accelerator=nvidia-l4. Received: 'disktype'",
        ),
        (("--node-selector", "a=b\nc: d"), "`node_selector` must be a label of nodes: KEY=VALUE"),
        (("--node-selector", f"a={'b' * 64}"), "`node_selector` must be a label of nodes: KEY=VALUE"),
        (("--toleration", "gpu:NoSchedul"), "Did you mean 'NoSchedule'?"),
        (("--toleration", "a b"), "`toleration` must be a taint of nodes"),
        (
            ("--env-from-secret", "KEY=abc123"),
            "must be NAME=SECRET:KEY, such as WANDB_API_KEY=wandb:key. Received: 'KEY'=....",
        ),
        (("--env-from-secret", "KEY=Secret:key"), "`env_from_secret` must be a name of a to z"),
        (("--env-from-secret", "KEY=s:a b"), "`env_from_secret` must be NAME=SECRET:KEY"),
        (("--env", "A=1", "--env-from-secret", "A=s:k"), "must not set the same variable. Received: A."),
        (("--service-account", "Me"), "`service_account` must be a name of a to z"),
    ],
)
def test_invalid_options_are_rejected(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    rest = () if words[-1] in ("train.py", "2") else ("-np", "2", "train.py")
    try:
        code = main(["k8s", "manifest", "--image", "i", *words, *rest])
    except SystemExit as leave:
        code = int(leave.code or 0)
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
