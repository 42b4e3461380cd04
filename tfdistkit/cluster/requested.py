"""What the script of this process asked for: without a strategy, processes of a job train apart from each other."""

from __future__ import annotations

_asked: set[str] = set()


def note(what: str) -> None:
    """Notes that the script asked for something.

    Args:
        what: `strategy`, or `rank` for any number that tells it its place in the job.
    """
    _asked.add(what)


def was_noted(what: str) -> bool:
    """Returns whether the script asked for something.

    Args:
        what: As `note` was called with.
    """
    return what in _asked
