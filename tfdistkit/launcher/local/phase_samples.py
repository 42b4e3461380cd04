"""Samples of what a process does in training: compute, wait for data, wait for its peers, run callbacks.

They are counted on the machine of the process, so no clocks of hosts are compared. An agent runs this module without
site-packages: it imports only the standard library and sent modules.
"""

from __future__ import annotations

import collections
from pathlib import Path

from tfdistkit.launcher.local.activity import Activity
from tfdistkit.report.hangs.layout import IN_FIT, Notes, Phase, read_notes

_EVERY_S = 0.25
WAITING, _COMPUTING, _INPUT = "waiting for other ranks", "computing", "waiting for data"
_WORDS = {Phase.BETWEEN: "callbacks", Phase.EVALUATION: "evaluation", Phase.SAVE: "saving"}


class PhaseSamples:
    """Samples the notes of one process.

    Args:
        folder: Its folder.

    Attributes:
        counts: The number of samples of each phase, as text.
    """

    def __init__(self, folder: Path):
        self.counts: collections.Counter[str] = collections.Counter()
        self._folder, self._activity, self._sampled_at = folder, Activity(0), 0.0

    def look(self, now: float) -> None:
        """Takes a sample, if one is due and the process trains.

        Args:
            now: The time, by `time.monotonic`.
        """
        elapsed_s = now - self._sampled_at
        if elapsed_s < _EVERY_S:
            return
        self._sampled_at = now
        notes = read_notes(self._folder)
        if notes is None:
            return
        if self._activity.pid != notes.pid:
            self._activity = Activity(notes.pid)
        self._activity.polling = notes.polling
        is_computing = self._activity.is_computing(elapsed_s)
        if notes.steps and notes.phase in IN_FIT:
            self.counts[_phase(notes, is_computing)] += 1


def _phase(notes: Notes, is_computing: bool) -> str:
    if notes.is_in_collective:
        return WAITING
    if notes.phase is not Phase.STEP:
        return _WORDS[notes.phase]
    if is_computing:
        return _COMPUTING
    # Without notes of collectives (Horovod) an idle rank waits for data or for its peers.
    return _INPUT if notes.begun or notes.ring_begun else WAITING
