"""One failure that all ranks share is shown once: `[1] the same traceback as [0]`.

Only what is the same line by line is left out, and only where it comes in one piece, as a worker writes it; all else
is shown. The logs keep everything.
"""

from __future__ import annotations

_HEADER = b"Traceback (most recent call last):"
# A job's ranks fail in different places only so often before nobody compares them any more.
_MOST_KNOWN = 16


class SameTracebacks:
    """Remembers the tracebacks that were shown, and leaves out those that others bring again."""

    def __init__(self) -> None:
        # Of each: whose it is, its lines and what followed at once, and how many of them must be the same.
        self._known: list[tuple[int, list[bytes], int]] = []

    def shorten(self, worker: int, lines: list[bytes], labels: list[bytes]) -> list[bytes]:
        """Returns what to show of lines that came together.

        Args:
            worker: Whose lines they are, by its place.
            lines: The lines.
            labels: What the workers are called.
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
        """Begins anew: a new attempt has failures of its own."""
        self._known.clear()


def _same(one: list[bytes], other: list[bytes]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _core(block: list[bytes]) -> int:
    """How many lines there are up to the exception's own line, the last where one was raised from another; 0 if the
    end is missing."""
    last = len(block) - 1 - block[::-1].index(_HEADER)
    for place, line in enumerate(block[last + 1 :], last + 1):
        if not line.startswith(b" "):
            return place + 1 if line else 0
    return 0
