"""Records whether the script of this process requested a strategy: without one, each process trains on its own."""

from __future__ import annotations

_requested: set[str] = set()


def note(what: str) -> None:
    """Records a request of the script.

    Args:
        what: `strategy`, or `rank` for the rank, the local rank, the world size or the chief.
    """
    _requested.add(what)


def was_noted(what: str) -> bool:
    """Returns whether the script made a request.

    Args:
        what: As in `note`.
    """
    return what in _requested
