"""`ProcessSet`: a subset of the ranks, for collectives among them. Horovod only."""

from __future__ import annotations

from collections.abc import Sequence

from tfdistkit.collectives import registry
from tfdistkit.collectives.resolve import no_process_sets
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import is_integer


class ProcessSet:
    """A subset of the ranks of a Horovod job: the argument `process_set=` of a collective.

    Every rank of the job makes it, in the same order, also the ranks outside of it; then only its ranks call
    collectives with it. A strategy that trains in its own process set does not need one here.

    Args:
        ranks: The ranks that take part, each once, at least one.

    Raises:
        OptionError: (a ValueError) if `ranks` are not ranks of this job.
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
        valid = [r for r in self.ranks if is_integer(r) and 0 <= r < size]
        if not valid or len(set(valid)) != len(self.ranks):
            raise OptionError(
                explain(
                    f"`ranks` must hold at least one rank of this job (0 to {size - 1}), each once.",
                    received=f"ranks={list(ranks)!r}",
                )
            )
        self.horovod_set = add_process_set(self.ranks)
        self.calls = registry.CallCounts()

    @property
    def size(self) -> int:
        """The number of ranks in the set."""
        return len(self.ranks)

    @property
    def included(self) -> bool:
        """Whether this process is in the set."""
        return bool(self.horovod_set.included())

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)})"
