"""Ranks that Horovod, MPI and SLURM tell in their variables, as these launchers set them."""

from __future__ import annotations

import pytest

import tfdistkit
from tfdistkit.cluster import ClusterSpec, TaskSpec, detect_cluster
from tfdistkit.errors import ClusterConfigError

HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
MPIEXEC = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


def started_with(monkeypatch: pytest.MonkeyPatch, *groups: dict[str, str], **more: str) -> ClusterSpec:
    for group in (*groups, more):
        for name, value in group.items():
            monkeypatch.setenv(name, value)
    return detect_cluster()


@pytest.mark.parametrize(
    ("variables", "rank", "size", "local_rank", "local_size", "source"),
    [
        (HOROVODRUN, 3, 4, 1, 2, "Horovod's variables"),
        (MPIRUN, 1, 3, 1, 2, "Open MPI's variables"),
        (MPIEXEC, 2, 4, 0, 2, "the variables of MPI's mpiexec"),
        ({**SRUN, "PMIX_RANK": "5"}, 5, 7, 1, 2, "SLURM's variables"),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"}, 5, 7, 1, 2, "SLURM's variables"),
        # A launcher that says nothing about hosts.
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, 1, 2, 0, 1, "Horovod's variables"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2, 0, 1, "the variables of MPI's mpiexec"),
    ],
)
def test_launchers(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    source: str,
) -> None:
    found = started_with(monkeypatch, variables)
    assert found == ClusterSpec({}, TaskSpec("worker", rank), local_rank, local_size, source, size)
    assert (found.rank, found.world_size, found.is_chief) == (rank, size, rank == 0)
    assert not found.has_addresses and not found.is_complete and found.address is None and found.workers == ()
    assert (tfdistkit.rank(), tfdistkit.world_size(), tfdistkit.local_rank()) == (rank, size, local_rank)


@pytest.mark.parametrize(("node", "expected"), [("0", 2), ("2", 2), ("3", 1), ("4", 3)])
def test_tasks_of_slurm_nodes(monkeypatch: pytest.MonkeyPatch, node: str, expected: int) -> None:
    per_node = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1,3", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "10"}
    found = started_with(monkeypatch, SRUN, per_node, SLURM_NODEID=node, PMIX_RANK="5")
    assert found.local_world_size == expected


def test_which_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started_with(monkeypatch, MPIRUN, HOROVODRUN).source == "Horovod's variables"
    tf_config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    assert started_with(monkeypatch, TF_CONFIG=tf_config).source == "TF_CONFIG"


def test_slurm_without_mpi_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started_with(monkeypatch, SRUN) == ClusterSpec()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**HOROVODRUN, "HOROVOD_RANK": "4"}, "`HOROVOD_RANK` does not fit .*HOROVOD_SIZE=4.*0 to 3"),
        ({**HOROVODRUN, "HOROVOD_RANK": "-1"}, "`HOROVOD_RANK` does not fit"),
        ({**HOROVODRUN, "HOROVOD_SIZE": "0"}, "`HOROVOD_SIZE` does not fit .*1 or more"),
        ({**HOROVODRUN, "HOROVOD_LOCAL_RANK": "2"}, "`HOROVOD_LOCAL_RANK` does not fit .*0 to 1"),
        ({**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "5"}, "`HOROVOD_LOCAL_SIZE` does not fit .*1 to 4"),
        ({**HOROVODRUN, "HOROVOD_RANK": "one"}, "`HOROVOD_RANK` is not a number"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "Only one of `OMPI_COMM_WORLD_RANK` and `OMPI_COMM_WORLD_SIZE`"),
        ({"SLURM_PROCID": "1", "PMIX_RANK": "1"}, "not complete.*no SLURM_STEP_NUM_TASKS and no SLURM_LOCALID"),
        ({**SRUN, "PMIX_RANK": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "does not tell the number of tasks"),
        ({**SRUN, "PMIX_RANK": "5", "SLURM_NODEID": "4"}, "does not tell the number of tasks"),
    ],
)
def test_contradictions(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterConfigError, match=f"(?s){words}"):
        started_with(monkeypatch, variables)
