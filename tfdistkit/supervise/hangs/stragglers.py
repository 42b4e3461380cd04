"""Finds the rank that the others wait for, by samples of the progress notes of all ranks.

A sample counts if all ranks train. A rank is behind in it if another rank has begun a later step, or waits in a
collective that this rank has not entered yet.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.launcher.local.activity import Activity
from tfdistkit.report.hangs.layout import IN_FIT, Notes, Phase, read_notes
from tfdistkit.report.names import ProcessName

_EVERY_S = 0.25
# With fewer samples the result is not reliable.
_FEWEST_SAMPLES = 40
# A straggler is behind in at least this share of the samples, and this many times as often as any other rank.
_SHARE, _TIMES = 0.2, 3.0
_WORDS = {Phase.BETWEEN: "callbacks", Phase.EVALUATION: "evaluation", Phase.SAVE: "saving"}
_COMPUTING, _INPUT = "computing", "waiting for data"


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for.

    Args:
        name: The rank.
        share: The share of the training time in which it was behind, from 0 to 1.
        phases: The share of each of its phases, the largest first.
    """

    name: ProcessName
    share: float
    phases: dict[str, float]

    def __str__(self) -> str:
        """Returns a sentence for the end of a job."""
        shares = ", ".join(f"{phase} {share:.0%}" for phase, share in self.phases.items() if share >= 0.01)
        share = f"{self.share:.0%} of the training time"
        return f"{self.name} was the slowest: the others waited for it in {share} ({shares})."


class Stragglers:
    """Samples the ranks of one attempt.

    Args:
        names: The processes.
        folders: The folder of each.
    """

    def __init__(self, names: Sequence[ProcessName], folders: Sequence[Path]):
        # With parameter servers the workers do not wait for each other.
        has_peers = len(names) > 1 and all(name.role is None for name in names)
        self._names, self._folders = (names, folders) if has_peers else ((), ())
        self._activities = [Activity(0) for _ in self._names]
        self._counts: list[collections.Counter[str]] = [collections.Counter() for _ in self._names]
        self._samples, self._sample_at = 0, 0.0

    def look(self, now: float) -> None:
        """Takes a sample, if one is due.

        Args:
            now: The time, by `time.monotonic`.
        """
        if not self._names or now < self._sample_at:
            return
        self._sample_at = now + _EVERY_S
        found = [read_notes(folder) for folder in self._folders]
        notes = [one for one in found if one is not None and one.steps and one.phase in IN_FIT]
        if len(notes) == len(self._names):
            self.add(notes)

    def add(self, notes: Sequence[Notes]) -> None:
        """Counts a sample.

        Args:
            notes: The notes of all ranks.
        """
        self._samples += 1
        is_busy = [self._is_busy(index, one) for index, one in enumerate(notes)]
        for index, one in enumerate(notes):
            if _is_behind(one, notes):
                own = _COMPUTING if is_busy[index] else _INPUT
                self._counts[index][own if one.phase is Phase.STEP else _WORDS[one.phase]] += 1

    def found(self) -> Straggler | None:
        """Returns the rank that the others waited for; None if there is no clear one."""
        if self._samples < _FEWEST_SAMPLES:
            return None
        totals = [sum(one.values()) for one in self._counts]
        index = max(range(len(totals)), key=totals.__getitem__)
        rest = max(total for other, total in enumerate(totals) if other != index)
        share = totals[index] / self._samples
        if share < _SHARE or totals[index] < _TIMES * rest:
            return None
        phases = {phase: count / self._samples for phase, count in self._counts[index].most_common()}
        return Straggler(self._names[index], share, phases)

    def _is_busy(self, index: int, notes: Notes) -> bool:
        if self._activities[index].pid != notes.pid:
            self._activities[index] = Activity(notes.pid)
            self._activities[index].polling = notes.polling
        return self._activities[index].is_computing(_EVERY_S)


def _is_behind(notes: Notes, of_all: Sequence[Notes]) -> bool:
    """Returns whether others wait for a rank; without notes of collectives (a ring, Horovod) by their steps alone."""
    if any(one.begun for one in of_all):
        return any(one.is_in_collective and one.begun > notes.begun for one in of_all)
    return notes.begun_steps < max(one.begun_steps for one in of_all)
