"""Scripts that can be read only once: stdin, a pipe, `<(...)` of the shell.

The launcher reads the script and stores it in the run folder, which only its user can access; each worker runs the
stored text under the original name, as `python` would.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.errors import OptionError, explain
from tfdistkit.report.private_files import make_folder, write_file, writing_logs

STDIN = "-"
# Marks such a program in the arguments of `tfdistkit.worker`.
FLAG = "--text"
_FILE_NAME = "script.py"
# Upper bound: an endless pipe must not fill the memory.
_LARGEST_BYTES = 64 << 20


@dataclass(frozen=True)
class PipedScript:
    """The text of a script, and how it was named.

    Args:
        name: The script's `sys.argv[0]`, as given on the command line.
        folder: The script's `sys.path[0]`.
        text: The source.
    """

    name: str
    folder: str
    text: bytes

    def program(self, run_dir: Path, args: Sequence[str]) -> tuple[str, ...]:
        """Returns the command of each worker, for `JobSpec.program`.

        Args:
            run_dir: The run folder.
            args: The script's `sys.argv[1:]`.
        """
        return (FLAG, str(run_dir / _FILE_NAME), self.folder, self.name, *args)

    def write(self, run_dir: Path) -> None:
        """Writes the script to the run folder.

        Args:
            run_dir: The run folder; it is created if missing.

        Raises:
            OptionError: if it cannot be written.
        """
        with writing_logs():
            make_folder(run_dir)
            write_file(run_dir / _FILE_NAME, self.text)


def given_name(program: Sequence[str]) -> str:
    """Returns the name of a script on the command line, for piped and ordinary scripts.

    Args:
        program: The command of each worker.
    """
    return program[3] if program[0] == FLAG else program[0]


def read_piped(script: str) -> PipedScript:
    """Reads a script to its end.

    Args:
        script: `-`, or the path of a pipe.

    Raises:
        OptionError: if it cannot be read, or is a terminal.
    """
    try:
        if script != STDIN:
            with open(script, "rb") as file:
                return PipedScript(script, _folder(script), _whole(script, file.fileno()))
        return PipedScript(script, "", _whole(script, sys.__stdin__.fileno() if sys.__stdin__ else 0))
    except OSError as error:
        raise OptionError(
            explain("The script must be a readable file or pipe.", received=f"{script!r}: {error}")
        ) from error


def _whole(script: str, descriptor: int) -> bytes:
    if os.isatty(descriptor):
        raise OptionError(
            explain(
                "The script must be a file or a pipe.",
                received=f"{script!r}, which is a terminal",
                do="Redirect a file into it: tfdistkit run -np 2 - < script.py",
            )
        )
    parts, size = [], 0
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
        size += len(part)
        if size > _LARGEST_BYTES:
            raise OptionError(
                explain(
                    f"The script must be at most {_LARGEST_BYTES >> 20} MiB.",
                    received=f"more than that from {script!r}",
                )
            )
    return b"".join(parts)


def _folder(script: str) -> str:
    """Returns Python's `sys.path[0]`: the folder of the file behind the descriptor, else that of the pipe."""
    path = os.path.join(os.getcwd(), script)
    real = os.path.realpath(path)
    if os.path.exists(real):
        return os.path.dirname(real)
    link = os.readlink(path) if os.path.islink(path) else ""
    return os.path.dirname(link if os.path.isabs(link) else path)
