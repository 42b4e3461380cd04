"""The first real error in the log of a build: one cause, not the 2,000 lines that follow from it."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What is shown at most, and the longest line of it.
_SHOWN_LINES = 12
_SHOWN_COLUMNS = 300

# `file:1:2: error: text`, as gcc, clang and nvcc say it.
_COMPILER = re.compile(r"^\s*\S[^:]*(?::\d+|\(\d+\))+:? (?:fatal |internal compiler )?error\b")
# Without a place: the compiler's own complaint.
_COMPILER_NAMES = r"<command-line>|cc1(?:plus)?|c\+\+|g\+\+|gcc|clang(?:\+\+)?|nvcc"
_COMPILER_ITSELF = re.compile(rf"^\s*(?:{_COMPILER_NAMES}): (?:fatal )?error:")
# CMake tries the compiler first, and shows what that said some lines below.
_COMPILER_TRIED = re.compile(r"^\s*CMake Error at .*CMakeTest\w+Compiler")
_TRIED_LINES = 40
_INCLUDED = re.compile(r"^\s*(?:In file included from|from) .*:\d+[:,]?")
# What else can be first, and how many lines after it belong to it.
_OTHERS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"^\s*CMake Error"), 8),
    (re.compile(r"undefined reference to|cannot find -l|: file not recognized"), 2),
    (re.compile(r"fatal error: (?:Killed|Terminated) signal|internal compiler error"), 1),
    (re.compile(r"No space left on device|Cannot allocate memory|virtual memory exhausted"), 0),
    (re.compile(r"^\s*nvcc (?:fatal|error)"), 2),
    (re.compile(r"^\s*(?:\w+\.)*(?:ModuleNotFoundError|ImportError|RuntimeError|OSError|AssertionError): "), 1),
)
# Only when there is nothing better: what make and pip say of the commands that they ran.
_LAST_RESORT = re.compile(r"^\s*(?:make(?:\[\d+\])?: \*\*\*|error: |ERROR: )")

_HINTS = (
    (re.compile(r"Killed signal"), "The machine ran out of memory: try again with MAKEFLAGS=-j1."),
    (re.compile(r"No space left"), "Make room, or build elsewhere: TFDISTKIT_CACHE_DIR, TMPDIR."),
)


def first_error(log: str) -> str:
    """Finds the first real error in a log.

    Args:
        log: All that the build printed.

    Returns:
        A few lines: the error, where it is, and what is to be done where that is known; the end of the log when
        nothing in it looks like an error.
    """
    lines = [line.rstrip()[:_SHOWN_COLUMNS] for line in log.splitlines()]
    found = _first(lines)
    if not found:
        found = [line for line in lines if line.strip()][-_SHOWN_LINES:]
    text = "\n".join(found)
    hints = [hint for pattern, hint in _HINTS if pattern.search(text)]
    return "\n".join([text, *hints])


def _first(lines: Sequence[str]) -> list[str]:
    for number, line in enumerate(lines):
        if _COMPILER.match(line) or _COMPILER_ITSELF.match(line):
            return _with_surroundings(lines, number)
        if _COMPILER_TRIED.match(line):
            return _block(lines, number, 4) + _first(lines[number + 1 : number + _TRIED_LINES])
        for pattern, following in _OTHERS:
            if pattern.search(line):
                return _block(lines, number, following)
    for number, line in enumerate(lines):
        if _LAST_RESORT.match(line):
            return _block(lines, number, 2)
    return []


def _with_surroundings(lines: Sequence[str], number: int) -> list[str]:
    """A compiler's error: through which file it came in, and the piece of code that it shows."""
    start = number
    while start and number - start < 4 and _INCLUDED.match(lines[start - 1]):
        start -= 1
    end = number + 1
    while end < len(lines) and end - number < 4 and re.match(r"^\s*\d*\s*\|", lines[end]):
        end += 1
    return list(lines[start:end])


def _block(lines: Sequence[str], number: int, following: int) -> list[str]:
    return [line for line in lines[number : number + 1 + following] if line.strip()]
