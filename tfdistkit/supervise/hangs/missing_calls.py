"""Reads which of Horovod's collectives some ranks wait in and others have not called.

The progress notes do not know the collectives of a compiled step. Horovod's coordinator does: its stall check writes
them to the stderr of rank 0 (`horovod/common/stall_inspector.cc` of Horovod 0.28.1). The launcher has it write them
within the hang timeout, see `launcher.rank_variables.stall_check`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from tfdistkit.report.names import ProcessName, listed
from tfdistkit.supervise.hangs.requests import Answer

# More than the longest message: six names for each rank.
_END_BYTES = 1 << 18
_MESSAGE = re.compile(r"Missing ranks:((?:\n\d+!?: \[[^\n]*\])+)")
_LINE = re.compile(r"\n(\d+)!?: \[([^\n]*)\]")
_SHOWN_CALLS = 2
# Names that are the user's end a path of TensorFlow's. Horovod and the strategy begin those that they make with these.
_MADE_BY_HOROVOD = re.compile("^Horovod(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter|GroupedAllreduce)_")
_MADE_BY_STRATEGY = "tfdistkit_"
# What is left of the name of a group that has none of its own.
_PART_OF_GROUP = re.compile(r"\d+of\d+")

# By rank: the names of the collectives that other ranks wait in, and this one has not called.
MissingCalls = dict[int, list[str]]


def missing_calls(folders: Sequence[Path], answers: Sequence[Answer]) -> MissingCalls:
    """Returns the calls of the last message since a process noted progress; empty without one.

    Args:
        folders: The folders of the processes.
        answers: Their current activity.
    """
    notes = [one.notes for one in answers if one.notes is not None and one.notes.polling]
    if not notes:
        return {}  # None of them uses Horovod.
    moved_at = max(one.since for one in notes) + time.time() - time.monotonic()
    for folder in folders:
        messages = _MESSAGE.findall(_end_of(folder / "stderr", moved_at))
        if messages:
            return {int(rank): names.removesuffix(" ...").split(", ") for rank, names in _LINE.findall(messages[-1])}
    return {}


def waits_in(missing: MissingCalls, name: ProcessName) -> bool:
    """Returns whether a process waits in a collective that another one has not called.

    Args:
        missing: The calls.
        name: The process.
    """
    own = missing.get(name.index, ())
    return any(call not in own for calls in missing.values() for call in calls)


def described(missing: MissingCalls) -> str:
    """Returns a sentence about the calls.

    Args:
        missing: The calls, at least one.
    """
    ranks: dict[str, list[ProcessName]] = {}
    for rank, names in sorted(missing.items()):
        ranks.setdefault(_some(names), []).append(ProcessName(rank))
    whose = " and ".join(f"{listed(some)} to call {calls}" for calls, some in ranks.items())
    return f"Horovod waits for {whose}: one rank left out a collective of the others, or made another one."


def _some(names: Sequence[str]) -> str:
    calls = list(dict.fromkeys(map(_shown, names)))
    return f"{', '.join(calls[:_SHOWN_CALLS])}{' and more' * (len(calls) > _SHOWN_CALLS)}"


def _shown(name: str) -> str:
    name = name.rpartition("/")[2]
    if name.startswith(_MADE_BY_STRATEGY):
        return "a collective of the strategy"
    name = _MADE_BY_HOROVOD.sub("", name)
    return "a collective without a name" if _PART_OF_GROUP.fullmatch(name) else f"`{name}`"


def _end_of(path: Path, moved_at: float) -> str:
    """Returns the end of a file; nothing if it is older than the last progress."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mtime < moved_at:
                return ""
            file.seek(max(status.st_size - _END_BYTES, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
