"""Expands SLURM's short notation: `node[01-03,07],gpu[1-2]x[1-3]` for hosts, `2(x3),1` for numbers of tasks."""

from __future__ import annotations

import itertools
import math
import re

from tfdistkit.errors import ClusterConfigError, explain

# A host or a range of hosts. Matches single characters: nested repetition takes exponential time to fail.
_HOSTS = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_PIECE = re.compile(r"[^\[\]]+|\[[0-9,-]+\]")
# A limited number of digits: `int` refuses thousands of them.
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")

# SLURM's own limit (MAX_SLURM_NODES): a longer list is an error, and would exhaust memory.
_LONGEST = 65_536


def expand_hosts(text: str, variable: str) -> tuple[str, ...]:
    """Expands a list of hosts, and keeps SLURM's order (n2 before n10).

    Args:
        text: Hosts and ranges, zero-padded or not, with any number of brackets in a name.
        variable: The variable that holds the text, for messages.

    Returns:
        One name for each host; the last bracket of a name varies fastest.

    Raises:
        ClusterConfigError: if the list is invalid or has more than 65536 hosts.
    """
    hosts: list[str] = []
    rest = text
    while True:
        match = _HOSTS.match(rest)
        if match is None:
            raise _error(text, variable)
        hosts += _expand(match[0], text, variable)
        if len(hosts) > _LONGEST:
            raise _error(text, variable)
        rest = rest[match.end() :]
        if not rest:
            return tuple(hosts)
        if not rest.startswith(","):
            raise _error(text, variable)
        rest = rest[1:]


def expand_counts(text: str, variable: str) -> tuple[int, ...]:
    """Expands numbers: `2(x3),1` is 2, 2, 2, 1.

    Args:
        text: Numbers, each with an optional repeat count.
        variable: The variable that holds the text, for messages.

    Returns:
        One number for each node.

    Raises:
        ClusterConfigError: if the list is invalid or has more than 65536 numbers.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= times <= _LONGEST - len(counts):
            raise ClusterConfigError(
                explain(
                    f"`{variable}` must list the number of tasks on each node.",
                    received=f"{variable}={text[:200]!r}",
                    expected="one number for each node of the step, such as '2(x3),1'",
                )
            )
        counts += [int(match[1])] * times
    return tuple(counts)


def _expand(name: str, text: str, variable: str) -> list[str]:
    """Expands one name with brackets into all combinations."""
    alternatives = [
        _numbers(piece[1:-1], text, variable) if piece.startswith("[") else [piece] for piece in _PIECE.findall(name)
    ]
    if math.prod(map(len, alternatives)) > _LONGEST:
        raise _error(text, variable)
    return ["".join(pieces) for pieces in itertools.product(*alternatives)]


def _numbers(ranges: str, text: str, variable: str) -> list[str]:
    """Expands `01-03,07` into 01, 02, 03, 07: the first number of a range sets the width."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _error(text, variable)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _LONGEST - len(numbers):
            raise _error(text, variable)
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def _error(text: str, variable: str) -> ClusterConfigError:
    return ClusterConfigError(
        explain(
            f"`{variable}` must be a list of hosts.",
            received=f"{variable}={text[:200]!r}",
            expected=f"up to {_LONGEST} hosts in SLURM's notation, such as 'node[01-03,07],login1'",
            do="Run `scontrol show hostnames` to see how SLURM reads it.",
        )
    )
