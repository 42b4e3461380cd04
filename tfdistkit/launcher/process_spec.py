"""One process to start, as plain data: what a backend gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.report.names import ProcessName


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    Args:
        name: What it is called, by its rank or by its role.
        host: The machine to start it on.
        command: The program and its arguments.
        env: The variables to set, over those of the starting process.
        folder: Where its logs, its crash record and what it leaves for the launcher go.
        passes_stdin: Whether it reads what the starting process would read; otherwise it reads nothing.
        number: Its number among all processes of the job, whatever their roles.
    """

    name: ProcessName
    host: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path
    passes_stdin: bool = False
    number: int = 0

    @property
    def stdout_path(self) -> Path:
        return self.folder / "stdout"

    @property
    def stderr_path(self) -> Path:
        return self.folder / "stderr"
