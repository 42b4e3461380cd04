"""Many tests look at one job: each brings a part of the script, and the ranks run all parts one after the other.

Starting ranks takes far longer than most of what is tested in them. A part that fails ends its job; those after it get
a job of their own, so one failure is one failing test.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rank_jobs import Provide, start_ranks, strategy_of

# Generous: dozens of parts on a busy machine. A job that stands still fails after this.
DEADLINE_S = 900.0

RUN_PARTS = Path(__file__).with_name("run_parts.py")

# What a part finds there already, besides `engine`, `rank` and `folder` (its own): most want the strategy.
STRATEGY = """
    import tfdistkit
    strategy = tfdistkit.strategy(engine, timeout_s=100)
"""


@dataclass(frozen=True)
class Sort:
    """What the parts of one job have in common."""

    engine: str
    world_size: int
    setup: str
    variables: tuple[tuple[str, str], ...]

    @property
    def reporting(self) -> int:
        """How many processes run the parts: all ranks, or the coordinator of a parameter-server job alone."""
        return 1 if self.engine == "parameter_server" else self.world_size


@dataclass
class Part:
    """A part of a script, and what each rank wrote of it: `printed`, and `error` where it failed."""

    code: str
    ends_job: bool
    results: list[dict[str, str | None] | None] = field(default_factory=list)
    job: str = "it was not run"

    @property
    def went_well(self) -> bool:
        """Whether all ranks came to its end."""
        return all(result is not None and result["error"] is None for result in self.results)

    def printed(self) -> list[str]:
        """Returns what each rank printed; raises what went wrong on any."""
        for rank, result in enumerate(self.results):
            if result is not None and result["error"]:
                raise AssertionError(f"rank {rank}: {result['error']}\nIt printed:\n{result['printed']}")
        if not self.results or None in self.results:
            raise AssertionError(f"not all ranks came to the end of this part: {self.results}\n{self.job}")
        return [str(result["printed"]) for result in self.results if result is not None]


class SharedJobs:
    """The jobs of a session, each started when a test first looks at it.

    Args:
        folder: Where they write.
        items: The tests that were chosen; those with a mark `part` bring a part.
        provide: Returns the folder that a fixture of this name makes (Horovod), or skips the test.
    """

    def __init__(self, folder: Path, items: list[pytest.Item], provide: Provide):
        self._folder, self._provide = folder, provide
        self._parts: dict[Sort, dict[str, Part]] = {}
        self._jobs = 0
        for item in items:
            mark = item.get_closest_marker("part")
            if mark is not None and hasattr(item, "callspec"):
                params = item.callspec.params
                self.add(mark, params["engine"], params.get("world_size", 2))

    def add(self, mark: pytest.Mark, engine: str, world_size: int) -> None:
        """Adds a part, unless it is there; see `part`."""
        of_sort = self._parts.setdefault(_sort(mark, engine, world_size), {})
        of_sort.setdefault(mark.args[0], Part(mark.args[0], mark.kwargs.get("ends_job", False)))

    def part(self, mark: pytest.Mark, engine: str, world_size: int) -> Part:
        """Returns the part of a test, after it was run.

        Args:
            mark: The mark `part`: the code; `setup`, `variables` and `ends_job` if not as usual.
            engine: What carries the collectives.
            world_size: How many ranks.
        """
        self.add(mark, engine, world_size)
        sort = _sort(mark, engine, world_size)
        parts = self._parts[sort]
        if not parts[mark.args[0]].results:
            self._run_all(sort, [part for part in parts.values() if not part.results])
        return parts[mark.args[0]]

    def _run_all(self, sort: Sort, left: list[Part]) -> None:
        left = sorted(left, key=lambda part: part.ends_job)
        while left:
            # One that ends its job is the last in it.
            last = next((i for i, part in enumerate(left) if part.ends_job), len(left) - 1)
            said = self._run(sort, left[: last + 1])
            done = next((i for i, part in enumerate(left[:last]) if not part.went_well), last) + 1
            if not any(left[0].results):
                done = len(left)  # Nothing works here: more jobs would only take time.
            for part in left[:done]:
                part.job = said
            for part in left[done:]:
                part.results = []
            left = left[done:]

    def _run(self, sort: Sort, parts: list[Part]) -> str:
        """Runs parts in one job and returns what the job said."""
        folder = self._folder / f"{self._jobs}-{sort.engine}-{sort.world_size}"
        self._jobs += 1
        folder.mkdir()
        (folder / "setup.py").write_text(textwrap.dedent(sort.setup))
        names = [f"part{i}" for i in range(len(parts))]
        for name, part in zip(names, parts):
            (folder / f"{name}.py").write_text(textwrap.dedent(part.code))
        options = ["--ends-job"] if parts[-1].ends_job else []
        words = [str(RUN_PARTS), *options, strategy_of(sort.engine), *names]
        with start_ranks(self._provide, sort.engine, words, folder, sort.world_size, **dict(sort.variables)) as running:
            try:
                ended = running.end(DEADLINE_S)
                said = f"exit code {ended.code}, left: {running.left()}\n{ended.stdout}\n{ended.stderr}"
            except subprocess.TimeoutExpired:
                said = f"it was still running after {DEADLINE_S} s\n{running.stdout}"
        for name, part in zip(names, parts):
            files = [folder / name / f"result.{rank}.json" for rank in range(sort.reporting)]
            part.results = [json.loads(file.read_text()) if file.exists() else None for file in files]
        if not said.startswith("exit code 0, left: []") and all(part.went_well for part in parts):
            parts[-1].results = [None] * sort.reporting  # It is not well if it ends like this.
        return said


def _sort(mark: pytest.Mark, engine: str, world_size: int) -> Sort:
    variables = tuple(sorted(mark.kwargs.get("variables", {}).items()))
    return Sort(engine, world_size, mark.kwargs.get("setup", STRATEGY), variables)
