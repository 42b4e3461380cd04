"""Real launchers on real hosts. What this machine cannot start is skipped, with one line that says why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from equal_training import ENVIRONMENT, train_alone
from interrupted_training import OPTIONS, TRAIN
from net_hosts import NetHosts, net_hosts, why_no_hosts
from slurm_cluster import SlurmCluster, slurm_cluster, why_no_slurm
from slurm_jobs import Run, started

# Set where real hosts must be tested: then what would be skipped fails.
_REQUIRED = "TFDISTKIT_REQUIRE_HOSTS"
os.environ["TESTS_WHOLE_EXIT"] = "1"  # Processes on hosts end as users' scripts do.
# Read when the tests begin: no test inherits a variable of ours.
_IS_REQUIRED = os.environ.get(_REQUIRED) == "1"

# Why something was skipped, for one line at the end.
_reasons: list[str] = []


def not_tested(what: str, why: str) -> None:
    """Skips a test, or lets it fail where hosts must be tested.

    Args:
        what: What is not tested without it.
        why: What this machine lacks; empty if nothing.
    """
    if not why:
        return
    reason = f"{what} is not tested: {why}"
    if _IS_REQUIRED:
        pytest.fail(reason, pytrace=False)
    if reason not in _reasons:
        _reasons.append(reason)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in _reasons:
        terminalreporter.write_line(reason, yellow=True)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real SLURM of four nodes: n1, n2, n3, n10."""
    not_tested("SLURM", why_no_slurm())
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetHosts]:
    """A login host, h0, and two hosts with sshd, h1 and h2. A test that breaks one mends it."""
    not_tested("ssh", why_no_hosts())
    with net_hosts(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


@pytest.fixture
def whole(hosts: NetHosts) -> Iterator[NetHosts]:
    """Two hosts, which are mended afterwards."""
    hosts.clean()
    yield hosts
    for number in hosts.numbers:
        if hosts.is_off(number):
            hosts.start(number)
        hosts.plug_cable(number)
    hosts.clean()


@pytest.fixture
def mpirun() -> list[str]:
    """Open MPI's mpirun, for more processes than there are cores."""
    not_tested("Open MPI", "" if shutil.which("mpirun") else "there is no mpirun (apt-get install openmpi-bin)")
    return ["mpirun", *["--allow-run-as-root"] * (os.geteuid() == 0), "--oversubscribe", "--bind-to", "none"]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the training of `equal_training` comes to in one process."""
    return train_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def interrupted_job(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A training that SLURM interrupts: it takes its time, while others are tested."""
    folder = tmp_path_factory.mktemp("interrupted")
    with started(slurm, folder, TRAIN, *OPTIONS, nodes="n1,n3", **ENVIRONMENT) as run:
        assert run.number
        yield run
