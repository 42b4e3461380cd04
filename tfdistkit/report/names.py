"""What a process of a job is called, in logs and in reports: `rank 1` where all are alike, else by its role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# There is one of them, so it needs no number.
_UNIQUE = "chief"
_MOST_SHOWN = 8


@dataclass(frozen=True)
class ProcessName:
    """The name of one process.

    Args:
        index: Its number among those of its role, from 0.
        role: `chief`, `worker` or `ps`; None in a job whose processes are all alike: then the index is the rank.
    """

    index: int
    role: str | None = None

    def __str__(self) -> str:
        """`rank 1`, `chief`, `worker 1`, `ps 0`: as in a sentence."""
        return f"rank {self.index}" if self.role is None else self.label

    @property
    def label(self) -> str:
        """`1`, `chief`, `worker 1`, `ps 0`: as before each line that it prints."""
        if self.role is None:
            return str(self.index)
        return self.role if self.role == _UNIQUE else f"{self.role} {self.index}"

    @property
    def folder(self) -> str:
        """`rank.1`, `chief.0`, `worker.1`, `ps.0`: its place in the run folder."""
        return f"{self.role or 'rank'}.{self.index}"


def attempt_folder(run_dir: Path, attempt: int) -> Path:
    """Returns where the processes of one attempt have their folders: the run folder, and for later ones a part of it.

    Args:
        run_dir: The run folder.
        attempt: How often the job was started again before, from 0.
    """
    return run_dir / f"attempt.{attempt}" if attempt else run_dir


def listed(names: Sequence[ProcessName]) -> str:
    """Returns `rank 1`, `ranks 0, 1, 2` or `worker 0, ps 1`; many are cut short."""
    plural = len(names) > 1 and all(name.role is None for name in names)
    shown = [name.label if plural else str(name) for name in names[:_MOST_SHOWN]]
    return "ranks " * plural + ", ".join(shown + ["..."] * (len(names) > _MOST_SHOWN))
