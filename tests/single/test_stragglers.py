"""Which rank the others wait for, from samples of notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdistkit.launcher.local.activity import Activity
from tfdistkit.report.hangs.layout import SIZE_BYTES, Notes, Phase, parse_notes
from tfdistkit.report.hangs.notes import ProgressNotes
from tfdistkit.report.names import ProcessName
from tfdistkit.supervise.hangs.stragglers import Stragglers

NAMES = [ProcessName(rank) for rank in range(3)]


def notes(phase: Phase, steps: int = 5, begun: int = 0, ended: int = 0) -> Notes:
    memory = bytearray(SIZE_BYTES)
    own = ProgressNotes(memory)
    own.count_steps(steps)
    own.enter(phase)
    for _ in range(begun):
        own.begin_operation(b"sum")
    for _ in range(ended):
        own.end_operation()
    found = parse_notes(bytes(memory))
    assert found is not None
    return found


WAITS = notes(Phase.STEP, begun=8, ended=7)
EVEN = [notes(Phase.STEP, begun=7, ended=7)] * 3


@pytest.fixture
def stragglers(monkeypatch: pytest.MonkeyPatch) -> Stragglers:
    monkeypatch.setattr(Activity, "is_computing", lambda *_: False)
    return Stragglers(NAMES, [Path(str(name)) for name in NAMES])


@pytest.mark.parametrize(
    ("slow", "phase"),
    [
        (notes(Phase.BETWEEN, begun=7, ended=7), "callbacks"),
        (notes(Phase.STEP, begun=7, ended=7), "waiting for data"),
        (notes(Phase.SAVE, begun=7, ended=7), "saving"),
    ],
)
def test_the_rank_that_others_wait_for(stragglers: Stragglers, slow: Notes, phase: str) -> None:
    for _ in range(30):
        stragglers.add([WAITS, slow, WAITS])
        stragglers.add(EVEN)
    found = stragglers.found()
    assert found is not None and found.name == NAMES[1] and found.phases == {phase: 0.5}
    text = f"rank 1 was the slowest: the others waited for it in 50% of the training time ({phase} 50%)."
    assert str(found) == text


def test_without_notes_of_collectives_steps_count(stragglers: Stragglers) -> None:
    for _ in range(60):
        stragglers.add([notes(Phase.STEP), notes(Phase.STEP), notes(Phase.BETWEEN)])
    found = stragglers.found()
    assert found is not None and found.name == NAMES[2] and found.phases == {"callbacks": 1.0}


def test_ranks_that_take_turns_are_none(stragglers: Stragglers) -> None:
    slow = notes(Phase.BETWEEN, begun=7, ended=7)
    for _ in range(30):
        stragglers.add([WAITS, slow, WAITS])
        stragglers.add([slow, WAITS, WAITS])
    assert stragglers.found() is None


def test_a_few_samples_and_small_shares_are_none(stragglers: Stragglers) -> None:
    slow = notes(Phase.BETWEEN, begun=7, ended=7)
    for _ in range(20):
        stragglers.add([WAITS, slow, WAITS])
    assert stragglers.found() is None
    for _ in range(200):
        stragglers.add(EVEN)
    assert stragglers.found() is None


def test_workers_of_parameter_servers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    found = Stragglers([ProcessName(0, "worker"), ProcessName(1, "worker")], [tmp_path, tmp_path])
    found.look(1e9)
    assert found.found() is None
