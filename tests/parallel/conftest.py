"""Jobs that many tests look at (`shared_jobs`)."""

from __future__ import annotations

import pytest
from shared_jobs import SharedJobs

# The first test of a job waits for all of its parts, and perhaps for Horovod to be built.
_TIMEOUT_S = 1800


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "part(code, setup, variables, ends_job): what a test runs in a shared job")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("part") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(scope="session")
def shared_jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SharedJobs:
    """The jobs that the chosen tests share."""
    return SharedJobs(tmp_path_factory.mktemp("jobs"), request.session.items, request.getfixturevalue)


@pytest.fixture
def engine() -> str:
    """What carries the collectives; tests are parametrized by it."""
    raise AssertionError("no engine")


@pytest.fixture
def world_size() -> int:
    """How many ranks, where tests are not parametrized by it."""
    return 2


@pytest.fixture
def printed(request: pytest.FixtureRequest, shared_jobs: SharedJobs, engine: str, world_size: int) -> list[str]:
    """What each rank printed in the part of this test (mark `part`), which all ranks came to the end of."""
    return shared_jobs.part(request.node.get_closest_marker("part"), engine, world_size).printed()
