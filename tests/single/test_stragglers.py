"""Which rank the others wait for, from samples of notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tfdistkit.launcher.local.activity import Activity
from tfdistkit.launcher.local.phase_samples import PhaseSamples
from tfdistkit.report.hangs import layout
from tfdistkit.report.hangs.layout import SIZE_BYTES, Phase
from tfdistkit.report.hangs.mirror import MirrorWriter
from tfdistkit.report.hangs.notes import ProgressNotes
from tfdistkit.report.names import ProcessName
from tfdistkit.supervise.hangs.stragglers import Stragglers, find

NAMES = [ProcessName(rank) for rank in range(3)]
WAITS = "waiting for other ranks"


def write_notes(folder: Path, phase: Phase, steps: int = 5, begun: int = 0, ended: int = 0, ring: int = 0) -> bytes:
    memory = bytearray(SIZE_BYTES)
    own = ProgressNotes(memory)
    own.count_steps(steps)
    own.enter(phase)
    for _ in range(begun):
        own.begin_operation(b"sum")
    for _ in range(ended):
        own.end_operation()
    own.note_ring(7 + ring if ring else 0, 7 if ring else 0)
    (folder / layout.FILE_NAME).write_bytes(memory)
    return bytes(memory)


@pytest.mark.parametrize(
    ("notes", "is_computing", "phase"),
    [
        ({"phase": Phase.STEP, "begun": 8, "ended": 7}, False, WAITS),
        ({"phase": Phase.STEP, "begun": 8, "ended": 7}, True, WAITS),
        ({"phase": Phase.BETWEEN, "begun": 8, "ended": 7}, False, WAITS),
        ({"phase": Phase.STEP, "ring": 1}, False, WAITS),
        ({"phase": Phase.STEP, "begun": 7, "ended": 7}, True, "computing"),
        ({"phase": Phase.STEP, "begun": 7, "ended": 7}, False, "waiting for data"),
        ({"phase": Phase.BETWEEN, "begun": 7, "ended": 7}, False, "callbacks"),
        ({"phase": Phase.EVALUATION, "begun": 7, "ended": 7}, True, "evaluation"),
        ({"phase": Phase.SAVE}, False, "saving"),
        # Under Horovod, whose collectives have no notes.
        ({"phase": Phase.STEP}, False, WAITS),
        ({"phase": Phase.STEP}, True, "computing"),
        ({"phase": Phase.BETWEEN}, False, "callbacks"),
        # Not in `fit`, and before the first step has ended.
        ({"phase": Phase.OUTSIDE}, True, None),
        ({"phase": Phase.STEP, "steps": 0}, True, None),
    ],
)
def test_what_a_sample_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: dict[str, int], is_computing: bool, phase: str | None
) -> None:
    monkeypatch.setattr(Activity, "is_computing", lambda *_: is_computing)
    write_notes(tmp_path, **notes)
    samples = PhaseSamples(tmp_path)
    samples.look(1.0)
    samples.look(1.1)
    assert samples.counts == ({} if phase is None else {phase: 1})
    samples.look(1.3)
    assert sum(samples.counts.values()) == 2 * (phase is not None)


@pytest.mark.parametrize("phase", ["callbacks", "computing", "waiting for data", "saving"])
def test_the_rank_that_others_wait_for(phase: str) -> None:
    others = {"computing": 30, WAITS: 30}
    found = find(NAMES, [others, {"computing": 30, phase: 60 if phase == "computing" else 30}, others])
    assert found is not None and found.name == NAMES[1] and found.phases == {phase: 0.5}
    text = f"rank 1 was the slowest: the others waited for it in 50% of the training time ({phase} 50%)."
    assert str(found) == text


def test_phases_are_what_the_rank_does_longer_than_others() -> None:
    others = {"computing": 40, "callbacks": 10, WAITS: 50}
    found = find(NAMES[:2], [{"computing": 60, "callbacks": 30, "saving": 10}, others])
    assert found is not None and found.share == 0.5
    assert {phase: round(share, 3) for phase, share in found.phases.items()} == pytest.approx(
        {"computing": 0.2, "callbacks": 0.2, "saving": 0.1}
    )


NONE: dict[str, Callable[[], list[dict[str, int]]]] = {
    "ranks take turns": lambda: [{"callbacks": 30, WAITS: 30}, {"callbacks": 30, WAITS: 30}, {WAITS: 60}],
    "two ranks are slow": lambda: [{"callbacks": 60}, {"callbacks": 60}, {WAITS: 60}],
    "communication is slow": lambda: [{WAITS: 60}, {WAITS: 59, "computing": 1}, {WAITS: 60}],
    "a small share": lambda: [{"computing": 170, WAITS: 30}, {"computing": 200}, {"computing": 170, WAITS: 30}],
    "few samples of one rank": lambda: [{WAITS: 60}, {"callbacks": 39}, {WAITS: 60}],
    "chance": lambda: [{WAITS: 24, "computing": 16}, {WAITS: 15, "computing": 25}, {WAITS: 25, "computing": 15}],
    "no samples": lambda: [{}, {}, {}],
}


@pytest.mark.parametrize("case", NONE)
def test_no_clear_straggler(case: str) -> None:
    assert find(NAMES, NONE[case]()) is None


def test_ranks_on_other_hosts_are_sampled_there(tmp_path: Path) -> None:
    """What agents send counts, and not the notes that they send once a second."""
    folders = [tmp_path / str(name.index) for name in NAMES[:2]]
    stragglers = Stragglers(NAMES[:2], folders)
    for folder, counts in zip(folders, [{WAITS: 50, "computing": 10}, {"callbacks": 60}], strict=True):
        folder.mkdir()
        notes = write_notes(folder, Phase.SAVE)
        MirrorWriter(folder).note(notes, 0.0, "S", True, json.loads(json.dumps(counts)))
    for now in range(100):
        stragglers.look(float(now))
    found = stragglers.found()
    assert found is not None and found.name == NAMES[1] and list(found.phases) == ["callbacks"]


def test_workers_of_parameter_servers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    names = [ProcessName(0, "worker"), ProcessName(1, "worker")]
    found = Stragglers(names, [tmp_path, tmp_path])
    write_notes(tmp_path, Phase.SAVE)
    for now in range(100):
        found.look(float(now))
    assert found.found() is None
