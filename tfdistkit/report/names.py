"""Names the processes of a job in logs and reports: `rank 1`, or by role in a job with roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The role with a single process, named without an index.
_UNIQUE = "chief"
_MOST_SHOWN = 8


@dataclass(frozen=True)
class ProcessName:
    """Names one process.

    Args:
        index: Its index within its role, from 0.
        role: `chief`, `worker` or `ps`; None in a job without roles: then the index is the rank.
    """

    index: int
    role: str | None = None

    def __str__(self) -> str:
        """Returns the name for a sentence: `rank 1`, `chief`, `worker 1`, `ps 0`."""
        return f"rank {self.index}" if self.role is None else self.label

    @property
    def label(self) -> str:
        """Returns the prefix of its output lines: `1`, `chief`, `worker 1`, `ps 0`."""
        if self.role is None:
            return str(self.index)
        return self.role if self.role == _UNIQUE else f"{self.role} {self.index}"

    @property
    def folder(self) -> str:
        """Returns its folder in the run folder: `rank.1`, `chief.0`, `worker.1`, `ps.0`."""
        return f"{self.role or 'rank'}.{self.index}"


def attempt_folder(run_dir: Path, attempt: int) -> Path:
    """Returns the folder of an attempt: the run folder for the first one, else a subfolder of it.

    Args:
        run_dir: The run folder.
        attempt: The number of restarts so far, from 0.
    """
    return run_dir / f"attempt.{attempt}" if attempt else run_dir


def listed(names: Sequence[ProcessName]) -> str:
    """Returns a list as text: `rank 1`, `ranks 0, 1, 2` or `worker 0, ps 1`; cut after some names."""
    plural = len(names) > 1 and all(name.role is None for name in names)
    shown = [name.label if plural else str(name) for name in names[:_MOST_SHOWN]]
    return "ranks " * plural + ", ".join(shown + ["..."] * (len(names) > _MOST_SHOWN))
