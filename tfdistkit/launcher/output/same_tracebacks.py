"""Show a traceback that several ranks share only once: `[1] the same traceback as [0]`.

Only identical lines are replaced, and only if they arrive in one piece, as a worker writes them. The logs are complete.
"""

from __future__ import annotations

_HEADER = b"Traceback (most recent call last):"
# Bounds the number of tracebacks to compare with.
_MOST_KNOWN = 16


class SameTracebacks:
    """Remembers the tracebacks that were shown, and shortens those that other workers repeat."""

    def __init__(self) -> None:
        # For each: its worker, its lines and those that followed at once, and how many of them must be equal.
        self._known: list[tuple[int, list[bytes], int]] = []

    def shorten(self, worker: int, lines: list[bytes], labels: list[bytes]) -> list[bytes]:
        """Returns the lines to show of lines that arrived together.

        Args:
            worker: The index of their worker.
            lines: The lines.
            labels: The prefixes of the workers.
        """
        if _HEADER not in lines:
            return lines
        start = lines.index(_HEADER)
        block = lines[start:]
        for owner, known, needed in self._known:
            same = _same(block, known)
            if owner != worker and same >= needed:
                return [*lines[:start], b"the same traceback as [%s]" % labels[owner], *block[same:]]
        needed = _core(block)
        if needed and len(self._known) < _MOST_KNOWN:
            self._known.append((worker, block, needed))
        return lines

    def forget(self) -> None:
        """Forgets all tracebacks, for a new attempt."""
        self._known.clear()


def _same(one: list[bytes], other: list[bytes]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _core(block: list[bytes]) -> int:
    """Returns the number of lines up to the line of the exception, the last of chained ones; 0 if it is missing."""
    last = len(block) - 1 - block[::-1].index(_HEADER)
    for number, line in enumerate(block[last + 1 :], last + 1):
        if not line.startswith(b" "):
            return number + 1 if line else 0
    return 0
