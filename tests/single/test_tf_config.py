"""TF_CONFIG <-> ClusterSpec, and its error messages."""

from __future__ import annotations

import json

import pytest

from tfdistkit import cluster, env
from tfdistkit.cluster import ClusterSpec, TaskSpec, from_tf_config, to_tf_config
from tfdistkit.errors import ClusterConfigError

TWO_WORKERS = {"worker": ["h1:1", "h2:2"]}


def text(cluster: object, role: object = "worker", index: object = 0, **more: object) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, **more})


def error_of(tf_config: str) -> str:
    with pytest.raises(ClusterConfigError) as caught:
        from_tf_config(tf_config)
    return str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        ClusterSpec({"worker": ("h1:1", "h2:2")}, TaskSpec("worker", 1)),
        ClusterSpec({"chief": ("h1:1",), "worker": ("h2:2", "h3:3"), "ps": ("h4:4",)}, TaskSpec("worker", 1)),
        ClusterSpec({"chief": ("[::1]:1",), "worker": ("[fd00::2]:2",)}, TaskSpec("chief", 0)),
        ClusterSpec({"chief": ("h1:1",), "worker": ("", "h2:2"), "ps": ("h4:4",)}, TaskSpec("worker", 1)),
        ClusterSpec({"worker": ("h1:1",)}, TaskSpec("evaluator", 0)),
    ],
)
def test_round_trip(spec: ClusterSpec) -> None:
    read = from_tf_config(to_tf_config(spec))
    assert (read.addresses, read.task) == (spec.addresses, spec.task)
    assert to_tf_config(read) == to_tf_config(spec)


def test_single_process_has_no_tf_config() -> None:
    assert to_tf_config(ClusterSpec()) == ""


def test_chief_comes_first_in_rank_order() -> None:
    cluster = {"worker": ["h2:2", "h3:3"], "chief": ["h1:1"]}
    spec = from_tf_config(text(cluster, "worker", 1))
    assert (spec.rank, spec.world_size, spec.is_chief, spec.address) == (2, 3, False, "h3:3")
    assert from_tf_config(text(cluster, "chief")).is_chief


def test_worker_0_is_the_chief_without_a_chief() -> None:
    assert from_tf_config(text(TWO_WORKERS)).is_chief
    assert not from_tf_config(text(TWO_WORKERS, index=1)).is_chief


def test_kubeflow_form() -> None:
    hosts = [f"job-worker-{index}.ns.svc:2222" for index in range(2)]
    cluster = {"chief": ["job-chief-0.ns.svc:2222"], "evaluator": ["job-evaluator-0.ns.svc:2222"], "worker": hosts}
    spec = from_tf_config(text(cluster, "worker", 1, environment="cloud", rpc_layer="grpc"))
    assert (spec.rank, spec.world_size) == (2, 3)
    assert "evaluator" not in spec.addresses, "nobody may wait for an evaluator"
    evaluator = from_tf_config(text(cluster, "evaluator", environment="cloud"))
    assert evaluator.address == "job-evaluator-0.ns.svc:2222"
    assert not evaluator.is_training


@pytest.mark.parametrize(
    ("role", "index", "rank", "is_chief", "address"),
    [
        ("chief", 0, 0, True, "job-chief-0.ns.svc:2222"),
        ("worker", 1, 1, False, "job-worker-1.ns.svc:2222"),
        ("ps", 1, None, False, "job-ps-1.ns.svc:2222"),
        ("evaluator", 0, None, False, "job-evaluator-0.ns.svc:2222"),
    ],
)
def test_kubeflow_form_with_parameter_servers(
    role: str, index: int, rank: int | None, is_chief: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"chief": 1, "evaluator": 1, "ps": 2, "worker": 3}
    hosts = {role: [f"job-{role}-{i}.ns.svc:2222" for i in range(count)] for role, count in counts.items()}
    monkeypatch.setenv(env.TF_CONFIG, text(hosts, role, index, environment="cloud"))
    spec = cluster.detect_cluster()
    assert (cluster.is_chief(), cluster.world_size(), spec.address) == (is_chief, 3, address)
    assert cluster.local_rank() == 0
    assert ("evaluator" in spec.addresses) == (role == "evaluator")
    if rank is not None:
        assert cluster.rank() == rank
    else:
        with pytest.raises(ClusterConfigError, match=f"task type '{role}'"):
            cluster.rank()


def test_the_launchers_variables_are_ignored_without_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may belong to an enclosing job."""
    monkeypatch.setenv(env.LOCAL_RANK, "5")
    monkeypatch.setenv(env.LOCAL_WORLD_SIZE, "9")
    for role in ("chief", "ps"):
        addresses = {"chief": ["h1:1"], "worker": ["h1:2"], "ps": ["h1:3"]}
        monkeypatch.setenv(env.TF_CONFIG, text(addresses, role))
        assert cluster.local_rank() == 0


def test_evaluator_needs_no_address() -> None:
    spec = from_tf_config(text(TWO_WORKERS, "evaluator"))
    assert spec.address is None
    with pytest.raises(ClusterConfigError, match="defined for training processes only"):
        _ = spec.rank


def test_sparse_cluster() -> None:
    spec = from_tf_config(text({"worker": {"1": "h2:2"}}, "worker", 1))
    assert spec.address == "h2:2"
    assert spec.addresses["worker"] == ("", "h2:2")
    assert not spec.is_complete


def test_an_index_may_be_digits_as_in_tensorflow() -> None:
    assert from_tf_config(text(TWO_WORKERS, index="1")).rank == 1


MISTAKES = {
    "not JSON": ("{'cluster': 1}", "TF_CONFIG must be JSON"),
    "nested without end": ("[" * 100_000, "TF_CONFIG must be JSON"),
    "a list": ("[]", "must be a JSON object"),
    "no cluster": ('{"task": {"type": "worker", "index": 0}}', "must have a `cluster`"),
    "empty cluster": (text({}), "must have a `cluster` that is not empty"),
    "empty roles": (text({"worker": []}), "must have a `cluster` that is not empty"),
    "cluster is a list": (text(["h1:1"]), "must have a `cluster`"),
    "no task": (json.dumps({"cluster": TWO_WORKERS}), "must have a `task`"),
    "no type": (json.dumps({"cluster": TWO_WORKERS, "task": {"index": 0}}), "must have a `type`"),
    "no index": (json.dumps({"cluster": TWO_WORKERS, "task": {"type": "worker"}}), "must have an `index`"),
    "unknown role": (
        text({"worker": ["h1:1"], "wroker": ["h2:2"]}),
        "A role in `cluster` in TF_CONFIG must be known. Did you mean 'worker'?",
    ),
    "unknown task role": (text(TWO_WORKERS, "trainer"), "A role in `task` in TF_CONFIG must be known"),
    "role is a number": (text(TWO_WORKERS, 3), "must be known"),
    "master": (text({"master": ["h1:1"]}, "master"), "Rename 'master', a role of TensorFlow 1, to 'chief'"),
    "index not a number": (text(TWO_WORKERS, index="one"), "`task.index` in TF_CONFIG must be an integer >= 0"),
    "index is true": (text(TWO_WORKERS, index=True), "must be an integer >= 0"),
    "index is a fraction": (text(TWO_WORKERS, index=0.5), "must be an integer >= 0"),
    "negative index": (text(TWO_WORKERS, index=-1), "must be an integer from 0 to 99999"),
    "index out of range": (text(TWO_WORKERS, index=2), "must be the index of a worker in `cluster`"),
    "index in a gap": (text({"worker": {"1": "h:1"}}, index=0), "must be the index of a worker in `cluster`"),
    "huge sparse index": (text({"worker": {"99999999999": "h:1"}}), "must be an integer from 0 to 99999"),
    "role not in cluster": (text(TWO_WORKERS, "ps"), "`task.type` in TF_CONFIG must be a role of `cluster`"),
    "two chiefs": (text({"chief": ["h1:1", "h2:2"]}, "chief"), "at most one chief"),
    "chief 1": (text({"chief": ["h1:1", "h2:2"], "worker": ["h3:3"]}, "chief", 1), "at most one chief"),
    "two evaluators": (text({**TWO_WORKERS, "evaluator": ["h3:1", "h4:1"]}), "at most one evaluator"),
    "evaluator 1": (text(TWO_WORKERS, "evaluator", 1), "index of the evaluator must be 0"),
    "no training role": (text({"ps": ["h1:1"]}, "ps"), "must have a training role"),
    "only an evaluator": (text({"evaluator": ["h1:1"]}, "evaluator"), "must have a training role"),
    "servers, no chief": (text({**TWO_WORKERS, "ps": ["h3:3"]}), "parameter servers must have a chief"),
    "servers, no chief, in a server": (text({**TWO_WORKERS, "ps": ["h3:3"]}, "ps"), "Add a task of the type 'chief'"),
    "servers, no worker": (text({"chief": ["h1:1"], "ps": ["h3:3"]}, "chief"), "parameter servers must have a worker"),
    "ps out of range": (
        text({"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]}, "ps", 1),
        "must be the index of a ps in `cluster`",
    ),
    "server's address twice": (text({"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:2"]}), "worker 0 and ps 0"),
    "server without port": (text({"chief": ["h:1"], "worker": ["h:2"], "ps": ["h"]}), "`cluster.ps[0]` in TF_CONFIG"),
    "one address twice": (text({"worker": ["h1:1", "H1:1"]}), "addresses of worker 0 and worker 1 must differ"),
    "one address, two roles": (
        text({"chief": ["h1:1"], "worker": ["h1:1"]}),
        "addresses of chief 0 and worker 0 must differ",
    ),
    "one address, two names": (text({"worker": ["localhost:1", "127.0.0.1:1"]}), "must differ"),
    "evaluator's address twice": (text({**TWO_WORKERS, "evaluator": ["h1:1"]}), "worker 0 and evaluator 0"),
    "no port": (text({"worker": ["h1"]}), "`cluster.worker[0]` in TF_CONFIG: An address must have a port"),
    "bare IPv6": (text({"worker": ["fd00::1"]}), "must be in brackets and have a port"),
    "IPv6 without port": (text({"worker": ["[fd00::1]"]}), "must have a port"),
    "port is a word": (text({"worker": ["h1:http"]}), "must be an integer from 1 to 65535"),
    "port 0": (text({"worker": ["h1:0"]}), "must be an integer from 1 to 65535"),
    "port too large": (text({"worker": ["h1:65536"]}), "must be an integer from 1 to 65535"),
    "no host": (text({"worker": [":1"]}), "must have a host"),
    "scheme": (text({"worker": ["grpc://h1:1"]}), "must contain only a host and a port"),
    "address is a number": (text({"worker": [2222]}), "`cluster.worker[0]` in TF_CONFIG must be an address"),
    "tasks are a text": (text({"worker": "h1:1"}), "`cluster.worker` in TF_CONFIG must be a list"),
    "wildcard": (text({"worker": ["0.0.0.0:1", "h2:2"]}), "all interfaces"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_error_message(name: str) -> None:
    tf_config, expected = MISTAKES[name]
    message = error_of(tf_config)
    assert expected in message
    assert "Received: " in message and "Expected: " in message


def test_a_long_tf_config_is_shortened_in_the_message() -> None:
    assert len(error_of("x" * 100_000)) < 1000


# Detection of the cluster from the environment.


def test_without_tf_config_this_is_a_single_process() -> None:
    assert (cluster.rank(), cluster.world_size(), cluster.local_rank(), cluster.is_chief()) == (0, 1, 0, True)
    assert cluster.detect_cluster().source == "single process"


def test_rank_comes_from_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TF_CONFIG, text({"worker": ["h1:1", "h2:1", "h1:2", "H2:2"]}, index=3))
    assert (cluster.rank(), cluster.world_size(), cluster.is_chief()) == (3, 4, False)
    assert cluster.local_rank() == 1
    assert cluster.detect_cluster().local_world_size == 2


def test_the_launchers_variables_override_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TF_CONFIG, text({"worker": ["h1:1", "h1:2"]}, index=1))
    monkeypatch.setenv(env.LOCAL_RANK, "0")
    monkeypatch.setenv(env.LOCAL_WORLD_SIZE, "1")
    spec = cluster.detect_cluster()
    assert (spec.local_rank, spec.local_world_size) == (0, 1)


@pytest.mark.parametrize(
    ("local_rank", "size", "expected"),
    [
        ("2", "2", "must be at least 0 and below `TFDISTKIT_LOCAL_WORLD_SIZE`"),
        ("-1", "2", "must be at least 0 and below `TFDISTKIT_LOCAL_WORLD_SIZE`"),
        ("0", "3", "must be from 1 to the world size in TF_CONFIG"),
        ("0", "0", "must be from 1 to the world size in TF_CONFIG"),
        ("0", "", "must be set together"),
        ("", "2", "must be set together"),
        ("x", "2", "must be an integer"),
    ],
)
def test_wrong_local_variables(monkeypatch: pytest.MonkeyPatch, local_rank: str, size: str, expected: str) -> None:
    monkeypatch.setenv(env.TF_CONFIG, text(TWO_WORKERS))
    monkeypatch.setenv(env.LOCAL_RANK, local_rank)
    monkeypatch.setenv(env.LOCAL_WORLD_SIZE, size)
    with pytest.raises(ClusterConfigError, match=expected):
        cluster.detect_cluster()
