"""Variables of several launchers in one environment: the one in use, and conflicts."""

from __future__ import annotations

import json

import pytest
from slurm_steps import BATCH, SALLOC, put, step

from tfdistkit import env
from tfdistkit.cluster import ClusterSpec, detect_cluster
from tfdistkit.cluster.detection import run_all_readers
from tfdistkit.errors import ClusterConfigError


def tf_config(index: int, size: int, role: str = "worker", **roles: int) -> dict[str, str]:
    hosts = {name: [f"{name}{i}:2222" for i in range(count)] for name, count in {"worker": size, **roles}.items()}
    return {env.TF_CONFIG: json.dumps({"cluster": hosts, "task": {"type": role, "index": index}})}


def horovod(rank: int, size: int) -> dict[str, str]:
    return {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)}


def mpirun(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), "PMIX_RANK": str(rank)}


def hydra(rank: int, size: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(size)}


def srun(rank: int, size: int, **more: str) -> dict[str, str]:
    """Returns the variables of one task on each of `size` nodes."""
    nodelist = "n1" if size == 1 else f"n[1-{size}]"
    counts = "1" if size == 1 else f"1(x{size})"
    return step([f"n{i + 1}" for i in range(size)], nodelist, counts, **more)[rank]


LAUNCHED = {env.LOCAL_RANK: "1", env.LOCAL_WORLD_SIZE: "2", env.JOB_ID: "abc"}

# name: (variables, source, rank, world size)
HARMLESS: dict[str, tuple[list[dict[str, str]], str, int, int]] = {
    "tfdistkit run in a batch script": ([BATCH, tf_config(1, 2), LAUNCHED], "TF_CONFIG", 1, 2),
    "tfdistkit run under salloc": ([SALLOC, tf_config(1, 2), LAUNCHED], "TF_CONFIG", 1, 2),
    "tfdistkit run in a step with one task": ([srun(0, 1), tf_config(1, 2), LAUNCHED], "TF_CONFIG", 1, 2),
    "tfdistkit run started by mpirun -np 1": ([mpirun(0, 1), tf_config(1, 2), LAUNCHED], "TF_CONFIG", 1, 2),
    "TF_CONFIG of one's own in a step": ([srun(1, 4), tf_config(1, 4)], "TF_CONFIG", 1, 4),
    "the same, with a chief": ([srun(2, 4), tf_config(1, 3, chief=1)], "TF_CONFIG", 2, 4),
    "one's own roles, in an order of one's own": (
        [srun(0, 4), tf_config(1, 2, chief=1, ps=1)], "TF_CONFIG", 1, 2,
    ),
    "an evaluator beside the workers": ([srun(1, 3), tf_config(1, 2, evaluator=1)], "TF_CONFIG", 1, 2),
    "one task of a step for each process": ([srun(0, 1), tf_config(3, 4)], "TF_CONFIG", 3, 4),
    "a sparse TF_CONFIG in a step": (
        [srun(1, 4), {env.TF_CONFIG: json.dumps(
            {"cluster": {"worker": {"1": "w1:1"}}, "task": {"type": "worker", "index": 1}})}], "TF_CONFIG", 1, 2,
    ),
    "horovodrun in a batch script": ([BATCH, horovod(3, 4)], "Horovod's variables", 3, 4),
    "horovodrun in an interactive step": ([srun(0, 1), horovod(3, 4)], "Horovod's variables", 3, 4),
    "Horovod's variables set from SLURM's": ([srun(3, 4), horovod(3, 4)], "Horovod's variables", 3, 4),
    "Horovod's variables set from MPI's": ([mpirun(3, 4), horovod(3, 4)], "Horovod's variables", 3, 4),
    "mpirun in a batch script": ([BATCH, mpirun(1, 8)], "Open MPI's variables", 1, 8),
    "mpirun, by its daemon of a step": ([srun(1, 2), mpirun(7, 12)], "Open MPI's variables", 7, 12),
    "the same, with TF_CONFIG": ([srun(1, 2), mpirun(7, 12), tf_config(7, 12)], "TF_CONFIG", 7, 12),
    "mpirun in an interactive step": ([srun(0, 1), mpirun(7, 8)], "Open MPI's variables", 7, 8),
    "mpiexec in a batch script": ([BATCH, hydra(2, 8)], "the variables of MPI's mpiexec", 2, 8),
    "mpiexec, by its daemon of a step": ([srun(1, 2), hydra(5, 8)], "the variables of MPI's mpiexec", 5, 8),
    "srun --mpi=pmix": ([srun(1, 2), {"PMIX_RANK": "1"}], "SLURM's variables", 1, 2),
    "srun --mpi=pmi2": ([srun(1, 2), {"PMI_RANK": "1", "PMI_SIZE": "2"}], "SLURM's variables", 1, 2),
    "srun": ([srun(1, 2)], "SLURM's variables", 1, 2),
    # Descriptions that are not used may be invalid.
    "tfdistkit run among remains of a step": (
        [BATCH, {"SLURM_STEP_NODELIST": "n["}, tf_config(1, 2), LAUNCHED], "TF_CONFIG", 1, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variables, source, rank, size = HARMLESS[name]
    put(monkeypatch, *variables)
    found = detect_cluster()
    assert (found.source, found.rank, found.world_size) == (source, rank, size)


# name: (variables, text on the first, text on the second, the two values of TFDISTKIT_CLUSTER)
WRONG: dict[str, tuple[list[dict[str, str]], str, str, str]] = {
    "tfdistkit run in every task of a step": (
        [srun(3, 4), tf_config(1, 2), LAUNCHED],
        'process 1 of 2 (TF_CONFIG={"cluster": {"worker": ["worker0:2222"',
        "process 3 of 4 (SLURM_JOB_ID=4711, SLURM_STEP_ID=2, SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4",
        "TFDISTKIT_CLUSTER=tf_config or TFDISTKIT_CLUSTER=slurm",
    ),
    "TF_CONFIG left in the shell, of one process": (
        [srun(1, 2), tf_config(0, 1)], "process 0 of 1 (TF_CONFIG=", "process 1 of 2 (SLURM_JOB_ID=",
        "TFDISTKIT_CLUSTER=slurm",
    ),
    "TF_CONFIG left in the shell, of the same size": (
        [srun(1, 2), tf_config(0, 2)], "process 0 of 2 (TF_CONFIG=", "process 1 of 2 (SLURM_JOB_ID=",
        "TFDISTKIT_CLUSTER=slurm",
    ),
    "TF_CONFIG with servers, of another size": (
        [srun(1, 5), tf_config(1, 2, chief=1, ps=1)], "process 2 of 4, worker 1 (TF_CONFIG=", "process 1 of 5",
        "TFDISTKIT_CLUSTER=slurm",
    ),
    "one task more than TF_CONFIG has, and no evaluator": (
        [srun(1, 3), tf_config(1, 2)], "process 1 of 2", "process 1 of 3", "TFDISTKIT_CLUSTER=slurm",
    ),
    "TF_CONFIG left in the shell of mpirun": (
        [mpirun(3, 4), tf_config(0, 2)], "process 0 of 2", "process 3 of 4 (OMPI_COMM_WORLD_RANK=3",
        "TFDISTKIT_CLUSTER=mpi",
    ),
    "TF_CONFIG left in the shell of horovodrun": (
        [horovod(3, 4), tf_config(0, 4)], "process 0 of 4", "process 3 of 4 (HOROVOD_RANK=3, HOROVOD_SIZE=4)",
        "TFDISTKIT_CLUSTER=horovod",
    ),
    "horovodrun in every task of a step": (
        [srun(3, 4), horovod(1, 2)], "process 1 of 2 (HOROVOD_RANK=1", "process 3 of 4 (SLURM_JOB_ID=",
        "TFDISTKIT_CLUSTER=horovod or TFDISTKIT_CLUSTER=slurm",
    ),
    "horovodrun with another rank than the step's": (
        [srun(3, 4), horovod(2, 4)], "process 2 of 4", "process 3 of 4", "TFDISTKIT_CLUSTER=slurm",
    ),
    "horovodrun in every rank of mpirun": (
        [mpirun(2, 3), horovod(1, 2)], "process 1 of 2", "process 2 of 3", "TFDISTKIT_CLUSTER=mpi",
    ),
    "roles for a step that Horovod sees without": (
        [srun(1, 4, TFDISTKIT_PS="1"), horovod(0, 4)], "process 0 of 4", "process 1 of 4, worker 0",
        "TFDISTKIT_CLUSTER=slurm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_conflicts_show_both(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variables, first, second, choices = WRONG[name]
    put(monkeypatch, *variables)
    with pytest.raises(ClusterConfigError, match="must describe the same job") as caught:
        detect_cluster()
    for words in (first, second, choices, "Received: ", "Expected: "):
        assert words in str(caught.value)


def test_a_long_tf_config_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, srun(1, 2), tf_config(0, 2000))
    with pytest.raises(ClusterConfigError) as caught:
        detect_cluster()
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("choice", "source", "rank", "size"),
    [
        ("tf_config", "TF_CONFIG", 0, 2),
        ("horovod", "Horovod's variables", 2, 3),
        ("mpi", "Open MPI's variables", 3, 4),
        ("slurm", "SLURM's variables", 4, 5),
        ("single", "single process", 0, 1),
    ],
)
def test_the_user_selects_the_source(
    monkeypatch: pytest.MonkeyPatch, choice: str, source: str, rank: int, size: int
) -> None:
    put(monkeypatch, tf_config(0, 2), horovod(2, 3), mpirun(3, 4), srun(4, 5), {env.CLUSTER: choice})
    found = detect_cluster()
    assert (found.source, found.rank, found.world_size) == (source, rank, size)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({env.CLUSTER: "slrum"}, "must be one of: tf_config, horovod, mpi, slurm, single. Did you mean 'slurm'"),
        (
            {env.CLUSTER: "slurm", **BATCH},
            "must name a launcher whose variables are set.*TFDISTKIT_CLUSTER=slurm.*SLURM_STEP_ID",
        ),
    ],
)
def test_an_invalid_selection(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    put(monkeypatch, variables)
    with pytest.raises(ClusterConfigError, match=f"(?s){words}"):
        detect_cluster()


def test_run_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(one.reader, one.variables, one.cluster) for one in run_all_readers()] == [
        (name, {}, None) for name in ("tf_config", "horovod", "mpi", "slurm")
    ]
    put(monkeypatch, {env.TF_CONFIG: "{"}, horovod(2, 3), BATCH)
    tf, hvd, mpi, slurm = run_all_readers()
    assert tf.cluster is None and "TF_CONFIG must be JSON" in str(tf.error)
    assert hvd.variables == horovod(2, 3) and hvd.error is None
    assert hvd.cluster == ClusterSpec({}, hvd.cluster.task, source="Horovod's variables", size=3)
    assert (mpi.variables, mpi.cluster, slurm.cluster, slurm.error) == ({}, None, None, None)
    assert slurm.variables["SLURM_PROCID"] == "0"
