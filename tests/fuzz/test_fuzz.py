"""Runs a hundred programs, thousands with `python -m tests.fuzz`; every case that once failed is among them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuzz import judging
from fuzz.generating import NUMBER_LOSSES, STATEFUL_STEPS, draw_programs
from fuzz.hunting import CASES, Failure, Hunt, Report, shrink
from fuzz.judging import Verdict
from fuzz.pool import Outcome
from fuzz.programs import Program

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]

# Programs for each strategy, without duplicates. With the cases that once failed they are about a hundred.
EXAMPLES = {
    "mirrored": slice(0, 8),
    "multiworker": slice(20, 22),
    "central_storage": slice(34, 36),
    "one_device": slice(40, 41),
    "parameter_server:one": slice(43, 44),
}
# Programs from number 5000 on that run without `tf.function`, which costs half.
EAGER = {
    "mirrored": slice(0, 14),
    "central_storage": slice(20, 25),
    "multiworker": slice(30, 37),
    "one_device": slice(60, 62),
    "parameter_server:one": slice(65, 68),
}
# Programs from `NUMBER_LOSSES` on, whose losses are no means over rows.
OF_NUMBERS = {
    "mirrored": slice(4, 7),
    "central_storage": slice(60, 61),
    "multiworker": slice(30, 32),
    "one_device": slice(0, 0),
    "parameter_server:one": slice(61, 62),
}
# Programs from `STATEFUL_STEPS` on, whose steps have state of their own.
OF_STATE = {
    "mirrored": slice(0, 14),
    "central_storage": slice(20, 24),
    "multiworker": slice(30, 35),
    "one_device": slice(0, 0),
    "parameter_server:one": slice(40, 43),
}
KEPT = sorted(CASES.glob("*.json"))


def _cases() -> dict[str, list[Program]]:
    found: dict[str, list[Program]] = {}
    for number, file in enumerate(KEPT):
        case = json.loads(file.read_text())
        # One strategy after the other of those under which it failed, and that run here.
        engines = [engine for engine in case["engines"] if engine in EXAMPLES]
        engine = engines[number % len(engines)]
        found.setdefault(engine, []).append(Program.from_json(case["program"]))
    return found


def _drawn() -> dict[str, list[Program]]:
    drawn = draw_programs(max(part.stop for part in EXAMPLES.values()))
    eager = draw_programs(max(part.stop for part in EAGER.values()), first=5000)
    numbers = draw_programs(max(part.stop for part in OF_NUMBERS.values()), first=NUMBER_LOSSES)
    stateful = draw_programs(max(part.stop for part in OF_STATE.values()), first=STATEFUL_STEPS)
    eager = [program.changed(eager=True, execution=1) for program in eager]
    return {
        engine: drawn[part] + eager[EAGER[engine]] + numbers[OF_NUMBERS[engine]] + stateful[OF_STATE[engine]]
        for engine, part in EXAMPLES.items()
    }


@pytest.fixture(scope="module")
def hunted() -> Iterator[Report]:
    """The report of all programs and kept cases of all strategies; failures are shrunk and kept."""
    cases = _cases()
    programs = {engine: [*cases.get(engine, []), *drawn] for engine, drawn in _drawn().items()}
    hunt = Hunt(list(programs))
    try:
        report = hunt.run(programs)
        known = {program.key() for kept in cases.values() for program in kept}
        for failure in [f for f in report.failures if f.program.key() not in known][:2]:
            hunt.shrink(failure)
            failure.keep()
        yield report
    finally:
        hunt.close()


@pytest.mark.parametrize("engine", EXAMPLES)
def test_programs_come_out_as_in_one_process(hunted: Report, engine: str) -> None:
    failures = [f for f in hunted.failures if f.engine == engine]
    assert not failures, "\n".join(f"{f.verdict.what}\n  {f.simplest or f.program}\n{f.details()}" for f in failures)
    for one in hunted.hung_once:
        warnings.warn(f"{one.engine} hung once, and not again: {one.program}\n{one.details()}", stacklevel=1)
    counts = hunted.of(engine)
    judged = sum(counts.values())
    # A fuzzer whose programs are all refused, or differ only by rounding, finds nothing.
    assert counts.get(judging.EQUAL, 0) > 0.7 * judged, str(hunted)
    assert counts.get(judging.INVALID, 0) < 0.1 * judged, str(hunted)


def test_programs_are_plain_data() -> None:
    for program in draw_programs(30, first=7000):
        assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program
        assert eval(str(program), {"Program": Program}).to_json() == program.to_json()


def test_the_same_programs_every_time() -> None:
    first = draw_programs(20)
    assert first == draw_programs(20)
    assert len({p.key() for p in first}) == 20


def test_shrinks_to_what_the_failure_needs() -> None:
    def fails(program: Program) -> bool:
        return program.rows > 3 and "l2" in program.body and program.optimizer != "sgd"

    program = Program(
        inputs="tokens",
        encoder="lstm",
        body=("dense", "l2", "dense"),
        optimizer="adam",
        rows=13,
        metrics=("mae",),
        epochs=3,
        acts=("fit", "evaluate"),
        callbacks=("stop",),
        eager=True,
    )
    assert shrink(program, fails) == Program(body=("l2",), optimizer="adam")


def _outcome(error: dict[str, Any] | None = None, **arrays: Any) -> Outcome:
    values = {"0 history": {"loss": [float(arrays.pop("loss", 1.0))]}}
    return Outcome(values, {name: np.asarray(value, "float32") for name, value in arrays.items()}, error, 0.1)


def test_judges() -> None:
    ours = {"type": "OptionError", "ours": True, "message": "no", "traceback": ""}
    one = _outcome(weights=[1.0, 2.0])
    close, far = _outcome(weights=[1.0 + 1e-7, 2.0]), _outcome(weights=[1.00001, 2.0])
    assert judging.judge(one, [close]).kind == judging.EQUAL
    assert judging.judge(one, [far]).what == "differs from one process: weights"
    assert judging.judge(one, [one, close]).what == "ranks differ: weights"
    assert judging.judge(one, [_outcome(weights=[1.0, 2.0], loss=np.nan)]).kind == judging.WRONG
    assert judging.judge(_outcome(loss=np.nan), [_outcome(loss=np.nan)]).kind == judging.EQUAL
    assert judging.judge(one, [_outcome()]).kind == judging.WRONG
    assert judging.judge(one, [_outcome(error=ours)]).kind == judging.REFUSED
    assert judging.judge(one, [_outcome(error=ours), one]).kind == judging.WRONG
    assert judging.judge(one, [_outcome(error={**ours, "ours": False})]).kind == judging.WRONG
    assert judging.judge(_outcome(error=ours), [one]).kind == judging.INVALID


def test_keeps_cases(tmp_path: Path) -> None:
    failure = Failure("mirrored", Program(rows=3), Verdict(judging.WRONG, "differs"))
    file = failure.keep(tmp_path)
    Failure("multiworker", Program(rows=3), Verdict(judging.WRONG, "differs")).keep(tmp_path)
    kept = json.loads(file.read_text())
    assert kept["engines"] == ["mirrored", "multiworker"]
    assert Program.from_json(kept["program"]) == Program(rows=3)


def test_faults_can_be_planted_again() -> None:
    """What `python -m tests.fuzz.planted` replaces is still there."""
    code = "from fuzz import planted\nfor name in planted.FAULTS:\n    planted.plant(name)\nprint(len(planted.FAULTS))"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "-1"}
    words = [sys.executable, "-c", f"import tfdistkit.strategies.keras_patches\n{code}"]
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0 and int(ended.stdout) >= 13, ended.stderr
