"""`srun python train.py` on two nodes, with nothing but SLURM's variables: the same training as in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from equal_training import ENVIRONMENT, check_equal, read_results, write_training
from slurm_cluster import SlurmCluster
from slurm_jobs import Run

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240
# It runs twice, and SLURM lets it wait in between.
INTERRUPTED_S = 420


def srun(slurm: SlurmCluster, folder: Path, strategy: str, hosts: str, **variables: str) -> list[dict[str, Any]]:
    command = ["srun", "-w", hosts, "-n2", "-l", "-K1", sys.executable, write_training(folder), strategy]
    ended = slurm.run(*command, cwd=folder, deadline_s=DEADLINE_S, **{**ENVIRONMENT, **variables})
    assert ended.returncode == 0, ended.stderr
    return read_results(ended.stdout)


@pytest.mark.tensorflow
def test_multiworker(slurm: SlurmCluster, alone: dict[str, Any], tmp_path: Path) -> None:
    check_equal(srun(slurm, tmp_path, "multiworker", "n1,n2"), alone, ["n1", "n2"], "MultiWorkerStrategy")


@pytest.mark.tensorflow
@pytest.mark.horovod
def test_horovod_finds_its_ranks_by_itself(
    slurm: SlurmCluster, alone: dict[str, Any], horovod_path: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join([str(horovod_path), str(ROOT)])
    # Horovod with MPI would look for MPI's world, which is not there.
    results = srun(slurm, tmp_path, "horovod", "n2,n10", PYTHONPATH=path, TFDISTKIT_PORT="23456")
    check_equal(results, alone, ["n2", "n10"], "HorovodStrategy")
    assert all(one["horovod_over"] == "gloo" for one in results)


@pytest.mark.thorough
@pytest.mark.tensorflow
@pytest.mark.horovod
def test_horovod_over_mpi(
    slurm: SlurmCluster, alone: dict[str, Any], horovod_with_mpi: Path, mpirun: list[str], tmp_path: Path
) -> None:
    """`srun --mpi=pmix` makes MPI's world, and then nobody has to meet before."""
    path = os.pathsep.join([str(horovod_with_mpi), str(ROOT)])
    tcp = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "eth0"}
    results = srun(slurm, tmp_path, "horovod", "n1,n2", SLURM_MPI_TYPE="pmix", PYTHONPATH=path, **tcp)
    check_equal(results, alone, ["n1", "n2"], "HorovodStrategy")
    assert all(one["horovod_over"] == "mpi" for one in results)


@pytest.mark.tensorflow
@pytest.mark.timeout(480)
def test_a_training_that_reaches_its_time_limit_goes_on_as_if_nothing_had_happened(
    slurm: SlurmCluster, interrupted_job: Run
) -> None:
    assert interrupted_job.end(INTERRUPTED_S) == 0, interrupted_job.told
    results = [line.partition("RESULT ")[2] for line in interrupted_job.told.splitlines() if "RESULT " in line]
    assert results == ["restarts 1, begins at step 1: False, the same weights: True"] * 2, interrupted_job.told
    assert slurm.job(interrupted_job.number)["Restarts"] == "1"
