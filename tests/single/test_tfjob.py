"""TF_CONFIG of Kubeflow's TFJob (training operator 1.x) is read unchanged."""

from __future__ import annotations

import pytest

from tfdistkit import env
from tfdistkit.cluster import detect_cluster
from tfdistkit.errors import ClusterConfigError


def address(role: str, index: int) -> str:
    return f"test-tfjob-{role}-{index}.ns3.svc:2222"


def tfjob(replicas: dict[str, int], role: str, index: int) -> str:
    """Returns compact JSON with sorted roles, as Go writes a map."""
    clusters = [
        f'"{name}":[' + ",".join(f'"{address(name, i)}"' for i in range(replicas[name])) + "]"
        for name in sorted(replicas)
    ]
    task = f'"task":{{"type":"{role}","index":{index}}}'
    return f'{{"cluster":{{{",".join(clusters)}}},{task},"environment":"cloud"}}'


TWO_WORKERS = (
    '{"cluster":{"worker":["mnist-worker-0.kubeflow.svc:2222","mnist-worker-1.kubeflow.svc:2222"]},'
    '"task":{"type":"worker","index":1},"environment":"cloud"}'
)
ONE_WORKER = (
    '{"cluster":{"worker":["test-tfjob-worker-0.ns1.svc.tf.training.com:2222"]},'
    '"task":{"type":"worker","index":0},"environment":"cloud"}'
)
CHIEF = {"chief": 1, "worker": 2}
EVALUATED = {"chief": 1, "evaluator": 1, "worker": 2}
SERVED = {"chief": 1, "evaluator": 1, "ps": 2, "worker": 3}

# TF_CONFIG, rank or None, world size, whether it is the chief, own address, whether it knows the evaluator's
JOBS: dict[str, tuple[str, int | None, int, bool, str, bool]] = {
    "two workers": (TWO_WORKERS, 1, 2, False, "mnist-worker-1.kubeflow.svc:2222", False),
    "one worker, in a domain": (ONE_WORKER, 0, 1, True, "test-tfjob-worker-0.ns1.svc.tf.training.com:2222", False),
    "chief": (tfjob(CHIEF, "chief", 0), 0, 3, True, address("chief", 0), False),
    "worker beside a chief": (tfjob(CHIEF, "worker", 1), 2, 3, False, address("worker", 1), False),
    "chief beside an evaluator": (tfjob(EVALUATED, "chief", 0), 0, 3, True, address("chief", 0), False),
    "worker beside an evaluator": (tfjob(EVALUATED, "worker", 0), 1, 3, False, address("worker", 0), False),
    "evaluator": (tfjob(EVALUATED, "evaluator", 0), None, 3, False, address("evaluator", 0), True),
    "coordinator": (tfjob(SERVED, "chief", 0), 0, 3, True, address("chief", 0), False),
    "worker with servers": (tfjob(SERVED, "worker", 2), 2, 3, False, address("worker", 2), False),
    "server": (tfjob(SERVED, "ps", 1), None, 3, False, address("ps", 1), False),
    "evaluator with servers": (tfjob(SERVED, "evaluator", 0), None, 3, False, address("evaluator", 0), True),
}


@pytest.mark.parametrize("name", JOBS)
def test_tfjob(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text, rank, size, is_chief, own, knows_evaluator = JOBS[name]
    monkeypatch.setenv(env.TF_CONFIG, text)
    monkeypatch.setenv(env.KUBERNETES, "10.96.0.1")
    found = detect_cluster()
    assert (found.world_size, found.is_chief, found.address, found.is_complete) == (size, is_chief, own, True)
    assert ("evaluator" in found.addresses) == knows_evaluator
    assert (found.local_rank, found.local_world_size) == (0, 1), "each in a container of its own"
    assert found.is_training == (rank is not None)
    if rank is not None:
        assert found.rank == rank


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # enableDynamicWorker: TF_CONFIG lists this process and the servers only, in another key.
        (
            '{"sparseCluster":{"worker":{"1":"job-worker-1.ns.svc:2222"},"ps":["job-ps-0.ns.svc:2222"]},'
            '"task":{"type":"worker","index":1}}',
            "must list all processes, not a `sparseCluster`.*enableDynamicWorker: false",
        ),
        (
            '{"sparseCluster":{"worker":{},"ps":["job-ps-1.ns.svc:2222"]},"task":{"type":"ps","index":1}}',
            "`sparseCluster`.*enableDynamicWorker: false",
        ),
        # Servers and workers without a chief were valid in TensorFlow 1.
        (
            tfjob({"ps": 1, "worker": 2}, "worker", 0),
            "parameter servers must have a chief.*Add a task of the type 'chief'",
        ),
        (tfjob({"evaluator": 1, "ps": 1, "worker": 1}, "worker", 0), "parameter servers must have a chief"),
        (tfjob({"master": 1, "worker": 2}, "master", 0), "Rename 'master', a role of TensorFlow 1, to 'chief'"),
    ],
)
def test_invalid_jobs(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setenv(env.TF_CONFIG, text)
    with pytest.raises(ClusterConfigError, match=f"(?s){words}"):
        detect_cluster()
