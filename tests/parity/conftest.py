"""Runs each engine once per session, on all cases of the selected tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers import QUICK_CASES

from parity import engines
from parity.cases import CASES
from parity.comparing import Recorded, load

# Engines that need a fixture: a folder for their PYTHONPATH.
_NEEDED = {"horovod": "horovod_path", "horovod_mpi": "horovod_with_mpi"}

# Generous: each takes one to two minutes on two free cores.
DEADLINE_S = 900


class Engines:
    """The engines of a session, each started on first use.

    Args:
        folder: The folder of their records.
        names: Returns the cases of an engine.
        alone: The engines of one process. Each keeps one core busy, so two run at a time.
        provide: Returns the folder of a fixture by its name (Horovod), or skips the test.
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
        """Starts an engine once."""
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
            self.start_next()  # On the core that is now free.

    def start_next(self) -> None:
        """Starts the next engine of one process, if any."""
        if self._alone:
            self.start(self._alone[0])

    def records(self, engine: str, case: str) -> list[Recorded]:
        """Returns the record of each rank of an engine for a case."""
        self.start(engine)
        self._wait(engine)
        try:
            return [load(str(self.folder / engine), case, r) for r in range(engines.PROCESSES.get(engine, 1))]
        except FileNotFoundError:
            raise self._ended[engine] or AssertionError(f"{engine} left no record of {case}") from None

    def rows(self, engine: str, names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
        """Runs rows of the fault table (`run_rows.ROWS`) once; returns the results of each rank, by row."""
        key = f"{engine}.{'-'.join(names)}"
        if key not in self._rows:
            folder = self.folder / key
            arguments = ["-m", "parity.run_rows", engine, str(folder), *names]
            engines.start(folder, arguments, engines.PROCESSES.get(engine, 1)).wait(DEADLINE_S)
            ranks = range(engines.PROCESSES.get(engine, 1))
            self._rows[key] = {n: [json.loads((folder / f"{n}.{r}.json").read_text()) for r in ranks] for n in names}
        return self._rows[key]

    def kill(self) -> None:
        """Ends all processes."""
        for job in self._jobs.values():
            job.kill()


def _case_names(session: pytest.Session, engine: str) -> list[str]:
    """Returns the cases of the selected tests, by parameter or mark `cases`; the reference runs all of them."""
    chosen: set[str] = set()
    for item in session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "runs" in getattr(item, "fixturenames", ()) and engine in ("one", params.get("engine", engine)):
            chosen.update([params["case"]] if "case" in params else [])
            chosen.update(*(mark.args for mark in item.iter_markers("cases")))
    return [name for name in CASES if name in chosen]


def _engines_alone(session: pytest.Session) -> list[str]:
    """Returns the engines of one process that the selected tests need, without the reference."""
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    chosen = dict.fromkeys(p["engine"] for p in params if "engine" in p and "case" in p)
    return [engine for engine in chosen if engine not in engines.PROCESSES and engine != "one"]


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Provides all engines of this session; starts the reference at once."""
    alone = _engines_alone(request.session)
    names = functools.partial(_case_names, request.session)
    running = Engines(tmp_path_factory.mktemp("parity"), names, alone, request.getfixturevalue)
    running.start("one")
    running.start_next()
    yield running
    running.kill()


# Engines share most code, so each runs every n-th case; `mirrored` and `multiworker` run the quick ones too. The same
# cases, so that one process, with which all are compared, runs few. The other cases are `thorough`; the programs of
# tests/fuzz run under these engines as well.
_SOME = {"mirrored": 20, "multiworker": 10, "central_storage": 20, "multiworker_ring": 60, "horovod": 40}

# Cases of engines that sum gradients, or write weights, in code of their own.
_ALWAYS = {
    "mirrored": ("loop_one_row",),
    "central_storage": ("lookups", "own_descent"),
    "multiworker": (
        "lookups",
        "center_loss",
        "gradients_by_switch",
        "own_logs",
        "gan",
        "loop_one_row",
        "inner_steps",
        "extragradient",
    ),
    "horovod": ("lookups", "sharpness_aware", "loop_last_row"),
}


@pytest.hookimpl(tryfirst=True)  # Before marks select tests.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks redundant cases as `thorough`, except cases that other tests use (mark `cases`)."""
    place = {name: number for number, name in enumerate(CASES)}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        engine, case = params.get("engine", ""), params.get("case", "")
        if engine in ("mirrored", "multiworker") and case in QUICK_CASES or case in _ALWAYS.get(engine, ()):
            continue
        if "case" in params and place.get(params["case"], 0) % _SOME.get(engine, 1):
            item.add_marker(pytest.mark.thorough)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cases(*names): the cases of the parity table that a test looks at")
