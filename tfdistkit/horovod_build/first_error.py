"""Find the first real error in the log of a build, instead of the 2,000 lines that follow from it."""

from __future__ import annotations

import re
from collections.abc import Sequence

# The maximum number of lines to show, and of characters per line.
_SHOWN_LINES = 12
_SHOWN_COLUMNS = 300

# `file:1:2: error: text`, the format of gcc, clang and nvcc.
_COMPILER = re.compile(r"^\s*\S[^:]*(?::\d+|\(\d+\))+:? (?:fatal |internal compiler )?error\b")
# Errors of the compiler itself, without a source line.
_COMPILER_NAMES = r"<command-line>|cc1(?:plus)?|c\+\+|g\+\+|gcc|clang(?:\+\+)?|nvcc"
_COMPILER_ITSELF = re.compile(rf"^\s*(?:{_COMPILER_NAMES}): (?:fatal )?error:")
# CMake first tests the compiler, and prints the compiler's output some lines below.
_COMPILER_TRIED = re.compile(r"^\s*CMake Error at .*CMakeTest\w+Compiler")
_TRIED_LINES = 40
_INCLUDED = re.compile(r"^\s*(?:In file included from|from) .*:\d+[:,]?")
# Other first errors, with the number of lines after them to show.
_OTHERS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"^\s*CMake Error"), 8),
    (re.compile(r"undefined reference to|cannot find -l|: file not recognized"), 2),
    (re.compile(r"fatal error: (?:Killed|Terminated) signal|internal compiler error"), 1),
    (re.compile(r"No space left on device|Cannot allocate memory|virtual memory exhausted"), 0),
    (re.compile(r"^\s*nvcc (?:fatal|error)"), 2),
    (re.compile(r"^\s*(?:\w+\.)*(?:ModuleNotFoundError|ImportError|RuntimeError|OSError|AssertionError): "), 1),
)
# Fallback: the errors of make and pip about the commands that they ran.
_LAST_RESORT = re.compile(r"^\s*(?:make(?:\[\d+\])?: \*\*\*|error: |ERROR: )")

_HINTS = (
    (re.compile(r"Killed signal"), "The machine ran out of memory: try again with MAKEFLAGS=-j1."),
    (re.compile(r"No space left"), "Free disk space, or build elsewhere: TFDISTKIT_CACHE_DIR, TMPDIR."),
)


def first_error(log: str) -> str:
    """Finds the first real error in a log.

    Args:
        log: The output of the build.

    Returns:
        A few lines: the error, its source line, and the fix if known; the end of the log if it contains no error.
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
    """Returns a compiler's error with the preceding include lines and the following source excerpt."""
    start = number
    while start and number - start < 4 and _INCLUDED.match(lines[start - 1]):
        start -= 1
    end = number + 1
    while end < len(lines) and end - number < 4 and re.match(r"^\s*\d*\s*\|", lines[end]):
        end += 1
    return list(lines[start:end])


def _block(lines: Sequence[str], number: int, following: int) -> list[str]:
    return [line for line in lines[number : number + 1 + following] if line.strip()]
