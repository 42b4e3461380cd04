"""Fixtures for all tests: an environment in which this process belongs to no cluster; Horovod, built if need be."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import NoReturn

import patience
import pytest
from horovod_environment import Unavailable, provide_horovod
from tiers import is_of_turn, is_slow, is_thorough

from tfdistkit import env

# What launchers tell a process of its cluster.
_CLUSTER = ("TFDISTKIT_", "HOROVOD_", "OMPI_", "PMIX_", "PMI_", "MPI_", "SLURM_", "SLURMD_", "PE_HOSTFILE")
# Set where Horovod must be tested: then what would be skipped fails.
_REQUIRED = "TFDISTKIT_REQUIRE_HOROVOD"
# Set where Horovod is built if it is not in the cache.
_BUILD = "TFDISTKIT_BUILD_HOROVOD"
# Which third of the slow files runs (`tiers.is_of_turn`); without it, all of them.
_TURN = os.environ.get("TFDISTKIT_TEST_TURN")
# The first of these tests builds Horovod, which takes minutes.
_HOROVOD_TIMEOUT_S = 1800
# What speaks to the tests, and not of a cluster.
_KEPT = (_REQUIRED, "TFDISTKIT_REQUIRE_HOSTS", _BUILD, env.CACHE_DIR)

# Why something of it was skipped, for one line at the end.
_reasons: list[str] = []

# This process, and those that tests start, load TensorFlow faster.
_STARTUP = Path(__file__).with_name("startup")
runpy.run_path(str(_STARTUP / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STARTUP), os.environ.get("PYTHONPATH")]))


patience.install()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(patience)
    config.addinivalue_line("markers", "horovod: runs Horovod, which is built first if it is not cached")


@pytest.hookimpl(tryfirst=True)  # Before marks select tests.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    later = set()
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if is_slow(path, item.name, parameters):
            item.add_marker(pytest.mark.slow)
            if _TURN and not is_of_turn(path, int(_TURN), parameters):
                later.add(item)
        if is_thorough(path, item.name):
            item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("horovod") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_HOROVOD_TIMEOUT_S))
    if later:
        config.hook.pytest_deselected(items=list(later))
        items[:] = [item for item in items if item not in later]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test inherits a cluster from the shell, or from another test."""
    for name in list(os.environ):
        if name == env.TF_CONFIG or (name.startswith(_CLUSTER) and name not in _KEPT):
            monkeypatch.delenv(name)


@pytest.fixture
def whole_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts end as users' scripts do (`startup/sitecustomize.py`)."""
    monkeypatch.setenv("TESTS_WHOLE_EXIT", "1")


@pytest.fixture(scope="session")
def horovod_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Horovod for this Python and its TensorFlow, for PYTHONPATH; nothing is installed."""
    may_build = "1" in (os.environ.get(_REQUIRED), os.environ.get(_BUILD))
    try:
        return provide_horovod(tmp_path_factory.mktemp("horovod"), may_build)
    except Unavailable as reason:
        _not_tested(f"Horovod is not tested. {reason}")


@pytest.fixture(scope="session")
def horovod_with_mpi(horovod_path: Path) -> Path:
    """The same, where MPI is in it."""
    if (horovod_path / "with-mpi").exists():
        return horovod_path
    _not_tested("Horovod with MPI is not tested. Not installed: apt-get install openmpi-bin libopenmpi-dev")


def _not_tested(reason: str) -> NoReturn:
    if os.environ.get(_REQUIRED) == "1":
        pytest.fail(reason, pytrace=False)
    if reason not in _reasons:
        _reasons.append(reason)
    pytest.skip(reason.partition(".")[0])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in _reasons:
        terminalreporter.write_line(reason, yellow=True)
