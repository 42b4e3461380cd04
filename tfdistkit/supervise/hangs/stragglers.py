"""Finds the rank that the others wait for: the one that itself waits least for the others.

Each rank is sampled on its own machine, so the result does not depend on clocks of hosts, or on how old their notes are
when they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.launcher.local.phase_samples import WAITING, PhaseSamples
from tfdistkit.report.hangs.mirror import read_mirror
from tfdistkit.report.names import ProcessName

# With fewer samples of a rank the result is not reliable.
_FEWEST_SAMPLES = 40
# The others wait longer than a straggler in at least this share of the samples, and by this many standard errors.
_SHARE, _ERRORS = 0.2, 3.0


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for.

    Args:
        name: The rank.
        share: The share of the training time in which the others waited for it, from 0 to 1.
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
        self._samples = [PhaseSamples(folder) for folder in self._folders]

    def look(self, now: float) -> None:
        """Takes samples of the processes on this machine, if they are due; agents sample those on other hosts.

        Args:
            now: The time, by `time.monotonic`.
        """
        for samples, folder in zip(self._samples, self._folders, strict=True):
            if read_mirror(folder) is None:
                samples.look(now)

    def found(self) -> Straggler | None:
        """Returns the rank that the others waited for; None if there is no clear one."""
        mirrors = [read_mirror(folder) for folder in self._folders]
        pairs = zip(self._samples, mirrors, strict=True)
        return find(self._names, [own.counts if mirror is None else mirror.samples for own, mirror in pairs])


def find(names: Sequence[ProcessName], counts: Sequence[Mapping[str, int]]) -> Straggler | None:
    """Returns the rank that the others waited for; None if there is no clear one.

    Args:
        names: The ranks.
        counts: The number of samples of each phase, for each rank.
    """
    totals = [sum(one.values()) for one in counts]
    if len(names) < 2 or min(totals) < _FEWEST_SAMPLES:
        return None
    shares = [{phase: count / total for phase, count in one.items()} for one, total in zip(counts, totals, strict=True)]
    order = sorted(range(len(names)), key=lambda index: shares[index].get(WAITING, 0.0))
    slowest, next_one = order[:2]
    lowest, next_lowest = (shares[index].get(WAITING, 0.0) for index in (slowest, next_one))
    error = math.sqrt(sum(p * (1 - p) / totals[i] for i, p in ((slowest, lowest), (next_one, next_lowest))))
    share = next_lowest - lowest
    if share < max(_SHARE, _ERRORS * error):
        return None
    others = [shares[index] for index in order[1:]]
    return Straggler(names[slowest], share, _own_phases(shares[slowest], others, share))


def _own_phases(own: Mapping[str, float], others: Sequence[Mapping[str, float]], share: float) -> dict[str, float]:
    """Returns what a rank did longer than the mean of the others, as parts of a share."""
    means = {phase: sum(other.get(phase, 0.0) for other in others) / len(others) for phase in own}
    more = {phase: own[phase] - means[phase] for phase in own if phase != WAITING and own[phase] > means[phase]}
    scale = share / sum(more.values())
    return {phase: more[phase] * scale for phase in sorted(more, key=more.__getitem__, reverse=True)}
