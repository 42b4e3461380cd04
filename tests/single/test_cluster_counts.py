"""Ranks from the variables of Horovod and MPI, as these launchers set them."""

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
        # A launcher without variables for local ranks.
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


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {**HOROVODRUN, "HOROVOD_RANK": "4"},
            "`HOROVOD_RANK` must be >= 0 and below `HOROVOD_SIZE`. Received: HOROVOD_RANK=4, HOROVOD_SIZE=4",
        ),
        ({**HOROVODRUN, "HOROVOD_RANK": "-1"}, "`HOROVOD_RANK` must be >= 0 and below"),
        ({**HOROVODRUN, "HOROVOD_SIZE": "0"}, "`HOROVOD_SIZE` must be >= 1"),
        ({**HOROVODRUN, "HOROVOD_LOCAL_RANK": "2"}, "`HOROVOD_LOCAL_RANK` must be >= 0 and below `HOROVOD_LOCAL_SIZE`"),
        ({**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "5"}, "`HOROVOD_LOCAL_SIZE` must be from 1 to `HOROVOD_SIZE`"),
        ({**HOROVODRUN, "HOROVOD_RANK": "one"}, "`HOROVOD_RANK` must be an integer"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "`OMPI_COMM_WORLD_RANK` and `OMPI_COMM_WORLD_SIZE` must be set together"),
    ],
)
def test_contradictions(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterConfigError, match=f"(?s){words}"):
        started_with(monkeypatch, variables)
