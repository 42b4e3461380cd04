"""Some of the ranks, for collectives among them. Horovod only."""

from __future__ import annotations

from collections.abc import Sequence

from tfdistkit.collectives import registry
from tfdistkit.collectives.resolve import no_process_sets
from tfdistkit.errors import OptionError, explain


class ProcessSet:
    """Some of the ranks of a job that runs over Horovod: what `process_set=` of a collective takes.

    Every rank makes it, in the same order, those too that are not in it; then only its ranks call collectives
    with it. A strategy that trains in a process set of its own does not need one here.

    Args:
        ranks: The ranks that take part, each once, at least one.

    Raises:
        OptionError: (a ValueError) if these are no ranks of this job.
        UnsupportedError: (a RuntimeError) if the strategy is not `horovod`, or Horovod was started without
            `HOROVOD_DYNAMIC_PROCESS_SETS=1`.
    """

    def __init__(self, ranks: Sequence[int]):
        self.ranks = tuple(sorted(ranks))
        last = registry.last_made()
        if last is None or getattr(last.strategy, "process_set", None) is None:
            raise no_process_sets(f"ProcessSet({list(ranks)!r})")
        from tfdistkit.collectives.horovod_communicator import add_process_set, job_size  # only where Horovod is there

        size = job_size()
        whole = [r for r in self.ranks if isinstance(r, int) and 0 <= r < size]
        if not whole or len(set(whole)) != len(self.ranks):
            raise OptionError(
                explain("`ranks` are no ranks.", received=f"ranks={list(ranks)!r}", expected=f"some of 0 to {size - 1}")
            )
        self.horovod_set = add_process_set(self.ranks)
        self.calls = registry.CallCounts()

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    @property
    def included(self) -> bool:
        """Whether this process is one of them."""
        return bool(self.horovod_set.included())

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)})"
