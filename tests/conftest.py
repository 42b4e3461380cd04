"""Fixtures for all tests: an environment in which this process belongs to no cluster; Horovod, built if need be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from horovod_environment import Unavailable, provide_horovod

from tfdistkit import env

# What launchers tell a process of its cluster.
_CLUSTER = ("TFDISTKIT_", "HOROVOD_", "OMPI_", "PMIX_", "PMI_", "MPI_", "SLURM_")
# Set where Horovod must be tested: then what would be skipped fails.
_REQUIRED = "TFDISTKIT_REQUIRE_HOROVOD"
# What speaks to the tests, and not of a cluster.
_KEPT = (_REQUIRED, env.CACHE_DIR)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "horovod: runs Horovod, which is built first if it is not cached")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test inherits a cluster from the shell, or from another test."""
    for name in list(os.environ):
        if name == env.TF_CONFIG or (name.startswith(_CLUSTER) and name not in _KEPT):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def horovod_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Horovod for this Python and its TensorFlow, for PYTHONPATH; nothing is installed."""
    try:
        return provide_horovod(tmp_path_factory.mktemp("horovod"))
    except Unavailable as reason:
        if os.environ.get(_REQUIRED) == "1":
            pytest.fail(str(reason), pytrace=False)
        pytest.skip(f"Horovod is not tested: {reason}")


@pytest.fixture(scope="session")
def horovod_with_mpi(horovod_path: Path) -> Path:
    """The same, where MPI is in it."""
    if (horovod_path / "with-mpi").exists():
        return horovod_path
    if os.environ.get(_REQUIRED) == "1":
        pytest.fail("Open MPI is not installed: apt-get install openmpi-bin libopenmpi-dev", pytrace=False)
    pytest.skip("Horovod with MPI is not tested: Open MPI is not installed")
