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
        name: Its name, from its rank or its role.
        host: The machine to start it on.
        command: The program and its arguments.
        env: The variables to set; they override those of the starting process.
        folder: The folder for its logs, its crash record and its other files for the launcher.
        passes_stdin: Whether it inherits stdin; otherwise its stdin is empty.
        number: Its index among all processes of the job, across roles.
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
