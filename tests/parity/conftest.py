"""Each engine runs once a session, on all the cases that the chosen tests ask for."""

from __future__ import annotations

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
        names: The cases that are asked for.
        next_engine: What starts when the reference has ended, while the tests still look at another engine.
        provide: Returns the folder that a fixture of this name makes (Horovod), or skips the test.
    """

    def __init__(self, folder: Path, names: list[str], next_engine: str | None, provide: Callable[[str], Path]):
        self._provide = provide
        self.folder = folder
        self.names = names
        self.next_engine = next_engine
        self._jobs: dict[str, engines.Job] = {}
        self._ended: dict[str, Exception | None] = {}
        self._rows: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def start(self, engine: str, names: list[str] | None = None) -> None:
        """Starts an engine, unless it was started."""
        if engine not in self._jobs:
            needed = _NEEDED.get(engine)
            path = str(self._provide(needed)) if needed else ""
            self._jobs[engine] = engines.start_cases(engine, self.folder / engine, names or self.names, path)

    def _wait(self, engine: str) -> None:
        if engine in self._ended:
            return
        try:
            self._jobs[engine].wait(DEADLINE_S)
            self._ended[engine] = None
        except engines.EngineError as error:
            self._ended[engine] = error
        if engine == "one" and self.next_engine:
            self.start(self.next_engine)  # on the core that the reference leaves

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


def _case_names(session: pytest.Session) -> list[str]:
    """The cases of the chosen tests: by parameter, or by the mark `cases`."""
    chosen: set[str] = set()
    for item in session.items:
        if "runs" in getattr(item, "fixturenames", ()):
            case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
            chosen.update([case] if case else [])
            chosen.update(*(mark.args for mark in item.iter_markers("cases")))
    return [name for name in CASES if name in chosen]


def _second_engine(session: pytest.Session) -> str | None:
    """The second of the engines of the chosen tests, if they are several."""
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    chosen = list(dict.fromkeys(p["engine"] for p in params if "engine" in p and "case" in p))
    return chosen[1] if len(chosen) > 1 else None


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All engines of this session; the reference starts at once."""
    names, second = _case_names(request.session), _second_engine(request.session)
    running = Engines(tmp_path_factory.mktemp("parity"), names, second, request.getfixturevalue)
    running.start("one")
    yield running
    running.kill()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cases(*names): the cases of the parity table that a test looks at")
