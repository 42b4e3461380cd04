"""Each engine runs once a session, on all the cases that the chosen tests ask for."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parity import engines
from parity.cases import CASES
from parity.comparing import Recorded, load

# Engines that need a fixture: a folder for their PYTHONPATH.
_NEEDED = {"horovod": "horovod_path", "horovod_mpi": "horovod_with_mpi"}

# Generous: each takes one to two minutes on two free cores.
DEADLINE_S = 900


class Engines:
    """The engines of a session, each started when a test first asks for it.

    Args:
        folder: Where they write.
        names: The cases that are asked for, by engine.
        alone: The engines of one process that the tests ask for. Each keeps one core busy, so two run at a time.
        provide: Returns the folder that a fixture of this name makes (Horovod), or skips the test.
    """

    def __init__(
        self, folder: Path, names: Callable[[str], list[str]], alone: list[str], provide: Callable[[str], Path]
    ):
        self._provide = provide
        self.folder = folder
        self.names = names
        self._alone = alone
        self._jobs: dict[str, engines.Job] = {}
        self._ended: dict[str, Exception | None] = {}
        self._rows: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def start(self, engine: str, names: list[str] | None = None) -> None:
        """Starts an engine, unless it was started."""
        if engine not in self._jobs:
            if engine in self._alone:
                self._alone.remove(engine)
            needed = _NEEDED.get(engine)
            path = str(self._provide(needed)) if needed else ""
            self._jobs[engine] = engines.start_cases(engine, self.folder / engine, names or self.names(engine), path)

    def _wait(self, engine: str) -> None:
        if engine in self._ended:
            return
        try:
            self._jobs[engine].wait(DEADLINE_S)
            self._ended[engine] = None
        except engines.EngineError as error:
            self._ended[engine] = error
        if engine not in engines.PROCESSES:
            self.start_next()  # on the core that this one leaves

    def start_next(self) -> None:
        """Starts the next engine of one process, if there is one left."""
        if self._alone:
            self.start(self._alone[0])

    def records(self, engine: str, case: str) -> list[Recorded]:
        """Returns what each rank of an engine wrote of a case."""
        self.start(engine)
        self._wait(engine)
        try:
            return [load(str(self.folder / engine), case, r) for r in range(engines.PROCESSES.get(engine, 1))]
        except FileNotFoundError:
            raise self._ended[engine] or AssertionError(f"{engine} left no record of {case}") from None

    def rows(self, engine: str, names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
        """Runs rows of the facts (`run_rows.ROWS`) once; returns what each rank saw, by row."""
        key = f"{engine}.{'-'.join(names)}"
        if key not in self._rows:
            folder = self.folder / key
            arguments = ["-m", "parity.run_rows", engine, str(folder), *names]
            engines.start(folder, arguments, engines.PROCESSES.get(engine, 1)).wait(DEADLINE_S)
            ranks = range(engines.PROCESSES.get(engine, 1))
            self._rows[key] = {n: [json.loads((folder / f"{n}.{r}.json").read_text()) for r in ranks] for n in names}
        return self._rows[key]

    def kill(self) -> None:
        """Ends what still runs."""
        for job in self._jobs.values():
            job.kill()


def _case_names(session: pytest.Session, engine: str) -> list[str]:
    """The cases of the chosen tests, by parameter or by the mark `cases`; the reference runs those of all engines."""
    chosen: set[str] = set()
    for item in session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "runs" in getattr(item, "fixturenames", ()) and engine in ("one", params.get("engine", engine)):
            chosen.update([params["case"]] if "case" in params else [])
            chosen.update(*(mark.args for mark in item.iter_markers("cases")))
    return [name for name in CASES if name in chosen]


def _engines_alone(session: pytest.Session) -> list[str]:
    """The engines of one process that the chosen tests ask for, without the reference."""
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    chosen = dict.fromkeys(p["engine"] for p in params if "engine" in p and "case" in p)
    return [engine for engine in chosen if engine not in engines.PROCESSES and engine != "one"]


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All engines of this session; the reference starts at once."""
    alone = _engines_alone(request.session)
    names = functools.partial(_case_names, request.session)
    running = Engines(tmp_path_factory.mktemp("parity"), names, alone, request.getfixturevalue)
    running.start("one")
    running.start_next()
    yield running
    running.kill()


# Which cases run each time under engines that share with `multiworker`, which runs all, all but what carries the sums
# or where the variables are: each how many cases, and from which on. The others are `thorough`; the programs of
# tests/fuzz run under these engines too.
_SOME = {"mirrored": (2, 0), "central_storage": (3, 0), "horovod": (6, 1), "horovod_mpi": (12, 4)}


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the cases that differ in little to `-m thorough`; what another test looks at (`cases`) stays."""
    place = {name: number for number, name in enumerate(CASES)}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        every, first = _SOME.get(params.get("engine", ""), (1, 0))
        if "case" in params and place.get(params["case"], first) % every != first:
            item.add_marker(pytest.mark.thorough)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cases(*names): the cases of the parity table that a test looks at")
