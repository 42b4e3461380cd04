"""Runs many programs in one process and under strategies, compares them, shrinks failures, and saves them as cases."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz import judging
from fuzz.generating import simpler
from fuzz.judging import Verdict
from fuzz.pool import Outcome, Pool
from fuzz.programs import Program

CASES = Path(__file__).with_name("cases")
# Metrics whose operations take float32 only.
_FLOAT32_METRICS = ("top2",)
# Seconds for shrinking one failure.
SHRINK_S = 150.0


class Reference:
    """Results of one process, each program run once for all strategies."""

    def __init__(self) -> None:
        self._pool = Pool("plain")
        self._found: dict[tuple[str, str, bool], Outcome] = {}
        self._lock = threading.Lock()

    def run(self, program: Program, floatx: str, trains: bool) -> Outcome:
        """Returns the results of one process for a program."""
        key = (program.key(), floatx, trains)
        with self._lock:
            if key not in self._found:
                self._found[key] = self._pool.run(program, floatx, trains=trains)[0]
            return self._found[key]

    def close(self) -> None:
        """Ends its process."""
        self._pool.close()


def check(program: Program, reference: Reference, pool: Pool) -> Verdict:
    """Runs a program in one process and under a strategy, and compares.

    Where numbers differ, both are run again in float64. What is equal there differed by rounding, which some programs
    make as large as a step (Adam divides by gradients near zero, as those of a bias before a normalization); a fault
    is as large in float64.
    """
    was_suspect = pool.is_suspect
    waiting = threading.Thread(target=reference.run, args=(program, "float32", pool.trains))
    waiting.start()  # In parallel.
    ranks = pool.run(program)
    waiting.join()
    expected = reference.run(program, "float32", pool.trains)
    verdict = judging.judge(expected, ranks)
    if verdict.what.startswith("Hang"):
        again = judging.judge(expected, pool.run(program))
        return again if again.kind == judging.WRONG else Verdict(judging.HUNG_ONCE, verdict.what, verdict.details)
    if verdict.kind == judging.WRONG and was_suspect:
        pool.close_processes()
        verdict = judging.judge(expected, pool.run(program))
    if verdict.kind != judging.WRONG or "differs" not in verdict.details:
        return verdict
    metrics = tuple(one for one in program.metrics if one not in _FLOAT32_METRICS)
    in_float64 = program.changed(metrics=metrics, weighted_metrics=program.weighted_metrics and bool(metrics))
    exact, ranks = reference.run(in_float64, "float64", pool.trains), pool.run(in_float64, "float64")
    if judging.judge(exact, ranks).kind == judging.EQUAL:
        return Verdict(judging.ROUNDING, verdict.what, verdict.details)
    return verdict


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = SHRINK_S) -> Program:
    """Returns a simpler program that fails as well: each field towards its simplest value, again and again.

    Args:
        program: One that fails.
        fails: Whether a program does.
        seconds: When to be content with what was found.
    """
    end, tried = time.monotonic() + seconds, {program.key()}
    while True:
        for candidate in simpler(program):
            if time.monotonic() > end:
                return program
            if candidate.key() in tried:
                continue
            tried.add(candidate.key())
            if fails(candidate):
                program = candidate
                break
        else:
            return program


@dataclass
class Failure:
    """A program that failed, and the simplest one that fails in the same way."""

    engine: str
    program: Program
    verdict: Verdict
    simplest: Program | None = None

    def details(self) -> str:
        """Returns the details: differences, or tracebacks."""
        lines = []
        for name, detail in self.verdict.details.items():
            if isinstance(detail, dict) and "traceback" in detail:
                detail = detail["traceback"][-2500:]
            lines.append(f"{name}: {detail}")
        return "\n".join(lines)

    def keep(self, folder: Path = CASES, why: str = "") -> Path:
        """Writes a case file, which every run of the tests replays."""
        program = self.simplest or self.program
        path = folder / f"{program.key()}.json"
        engines = [self.engine]
        if path.exists():
            engines = sorted({self.engine, *json.loads(path.read_text())["engines"]})
        case = {"found": why or self.verdict.what, "engines": engines, "program": program.to_json()}
        path.write_text(json.dumps(case, indent=1) + "\n")
        return path


@dataclass
class Report:
    """The results of a hunt."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    hung_once: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, engine: str, program: Program, verdict: Verdict) -> None:
        """Counts one verdict."""
        self.counts[engine, verdict.kind] += 1
        if verdict.kind in (judging.REFUSED, judging.INVALID, judging.WRONG):
            self.reasons[engine, verdict.kind, verdict.what] += 1
        if verdict.kind == judging.HUNG_ONCE:
            self.hung_once.append(Failure(engine, program, verdict))
        if verdict.kind == judging.WRONG:
            self.failures.append(Failure(engine, program, verdict))

    def of(self, engine: str) -> dict[str, int]:
        """Returns how often each verdict was given."""
        return {kind: number for (name, kind), number in sorted(self.counts.items()) if name == engine}

    def __str__(self) -> str:
        lines = [f"{engine}: {self.of(engine)}" for engine in dict.fromkeys(name for name, _ in self.counts)]
        lines += [
            f"  {number} x {engine} {kind}: {what}" for (engine, kind, what), number in self.reasons.most_common()
        ]
        return "\n".join([*lines, f"{self.seconds:.0f} s"])


class Hunt:
    """Reference and strategies side by side.

    Args:
        engines: Names of strategies (`fuzz.worker`).
        fault: A fault that is planted under the strategies; "" for none.
        horovod: A folder for PYTHONPATH with Horovod in it.
        stop_at_failure: Whether an engine stops at its first failure.
        say: What gets a line about each program.
    """

    def __init__(
        self,
        engines: list[str],
        fault: str = "",
        horovod: str = "",
        stop_at_failure: bool = False,
        say: Callable[[str], Any] = lambda line: None,
    ):
        self.reference = Reference()
        self.pools = {engine: Pool(engine, fault, horovod) for engine in engines}
        self._stop_at_failure, self._say = stop_at_failure, say
        self.report = Report()

    def run(self, programs: dict[str, list[Program]]) -> Report:
        """Runs the programs of each engine, the engines side by side."""
        start = time.monotonic()
        threads = [threading.Thread(target=self._run_engine, args=item) for item in programs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.report.seconds += time.monotonic() - start
        return self.report

    def _run_engine(self, engine: str, programs: list[Program]) -> None:
        for program in programs:
            program, start = _suited_to(engine, program), time.monotonic()
            try:
                verdict = check(program, self.reference, self.pools[engine])
            except Exception as error:  # A pool that does not start is a finding, too.
                verdict = Verdict(judging.WRONG, f"{type(error).__name__}", {"error": str(error)[-4000:]})
            self.report.add(engine, program, verdict)
            self._say(f"{engine} {time.monotonic() - start:.1f} s {verdict.kind} {verdict.what} {program}")
            if verdict.kind == judging.WRONG and self._stop_at_failure:
                return

    def shrink(self, failure: Failure, seconds: float = SHRINK_S) -> None:
        """Shrinks a failure to the simplest program that fails in the same way."""
        alike = failure.verdict.what.partition(":")[0]

        def fails(program: Program) -> bool:
            verdict = check(program, self.reference, self.pools[failure.engine])
            found = verdict.kind == judging.WRONG and verdict.what.partition(":")[0] == alike
            if found:
                failure.verdict = verdict
            return found

        failure.simplest = shrink(failure.program, fails, seconds)

    def close(self) -> None:
        """Ends all processes."""
        self.reference.close()
        for pool in self.pools.values():
            pool.close()


def _suited_to(engine: str, program: Program) -> Program:
    """Leaves out what parameter servers have not: distributed datasets, and logs of batches.

    Steps are asynchronous there, so the logs are those of the steps that have ended.
    """
    if not engine.startswith("parameter_server"):
        return program
    return program.changed(
        distributed=False, callbacks=tuple(name for name in program.callbacks if name != "batch_logs")
    )
