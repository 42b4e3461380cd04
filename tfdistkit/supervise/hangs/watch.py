"""Detects that a job hangs: no rank has moved for the hang timeout.

A rank moves when its progress notes change (a step, a phase, a collective), or when it uses CPU time or reads and
writes data. So tracing, a long validation and a long first epoch do not count as hangs. In `fit`, work without any note
counts for ten timeouts only, because a rank that spins in a loop makes no progress. The watch begins when a rank has
made its strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdistkit.launcher.local.activity import Activity
from tfdistkit.report.hangs.layout import IN_FIT, Notes, Phase, read_notes
from tfdistkit.report.hangs.mirror import read_mirror

# The number of timeouts without a note, in `fit`, that count as a hang even if ranks use CPU time.
_WORK_TIMEOUTS = 10
# The number of polls in one timeout, and the bounds of the poll interval in seconds.
_LOOKS = 20
_SHORTEST_S, _LONGEST_S = 0.25, 2.0
# A launcher that did not poll for this time was suspended itself, probably together with its job.
_SUSPENDED_S = 10.0


@dataclass
class _Rank:
    """The last observed activity of a process.

    Args:
        folder: Its folder.
        moved_at: When it last moved.
        noted_at: When its notes last changed.
        notes: Its last notes.
        activity: Its work.
    """

    folder: Path
    moved_at: float
    noted_at: float
    notes: Notes | None = None
    activity: Activity = field(default_factory=lambda: Activity(0))

    def look(self, now: float, elapsed_s: float) -> None:
        """Updates the activity."""
        notes, before = read_notes(self.folder), self.notes
        self.notes = notes
        if notes is not None and self.activity.pid != notes.pid:
            is_elsewhere = read_mirror(self.folder) is not None
            self.activity = _MirroredActivity(self.folder, notes.pid) if is_elsewhere else Activity(notes.pid)
        self.activity.polling = notes.polling if notes is not None else ()
        is_busy = self.activity.is_busy(elapsed_s) if notes is not None else False
        if notes is not None and (before is None or notes.changes != before.changes):
            self.noted_at = self.moved_at = now
        elif is_busy:
            self.moved_at = now


class _MirroredActivity(Activity):
    """Reads the activity of a process on another host, as its agent sends it."""

    def __init__(self, folder: Path, pid: int):
        super().__init__(pid)
        self._folder, self._work = folder, 0

    def is_busy(self, elapsed_s: float) -> bool:
        mirror, before = read_mirror(self._folder), self._work
        self._work = before if mirror is None else mirror.work
        return self._work != before


class HangWatch:
    """Watches the processes of one attempt.

    Args:
        timeout_s: The hang timeout, in seconds; None to watch nothing.
    """

    def __init__(self, timeout_s: float | None):
        self._timeout_s = timeout_s
        self._every_s = min(max((timeout_s or 0.0) / _LOOKS, _SHORTEST_S), _LONGEST_S)
        self._ranks: dict[Path, _Rank] = {}
        self._look_at = 0.0
        self.is_hung = False

    def look(self, folders: Sequence[Path], now: float) -> bool:
        """Returns whether the job hangs.

        Args:
            folders: The folders of the processes that run.
            now: The time, by `time.monotonic`.
        """
        if self._timeout_s is None or now < self._look_at:
            return self.is_hung
        before, self._look_at = self._look_at - self._every_s, now + self._every_s
        known = {one: self._ranks.get(one) or _Rank(one, now, now) for one in folders}
        # The end of a rank is progress, too.
        is_new = now - before > _SUSPENDED_S or set(known) != set(self._ranks)
        self._ranks = known
        for rank in known.values():
            if is_new:
                rank.moved_at = rank.noted_at = now
            rank.look(now, now - before)
        self.is_hung = bool(known) and self._decide(now)
        return self.is_hung

    def _decide(self, now: float) -> bool:
        assert self._timeout_s is not None
        ranks = list(self._ranks.values())
        with_notes = [rank for rank in ranks if rank.notes is not None and rank.notes.has_begun]
        if not with_notes:
            return False
        if now - max(rank.moved_at for rank in ranks) >= self._timeout_s:
            return True
        # Workers and parameter servers are in `fit` with their coordinator.
        phases = {rank.notes.phase for rank in with_notes if rank.notes is not None} - {Phase.SERVING}
        in_fit = bool(phases) and phases <= set(IN_FIT)
        return in_fit and now - max(rank.noted_at for rank in ranks) >= _WORK_TIMEOUTS * self._timeout_s
