"""A script that can be read only once - stdin, a pipe, `<(...)` of the shell - for workers that all need its text.

The launcher reads it and keeps it in the run folder, which is its user's alone; each worker runs that text under the
name that was given, as `python` would.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.errors import OptionError, explain
from tfdistkit.report.private_files import make_folder, write_file

STDIN = "-"
# The mark of such a program in the words for `tfdistkit.worker`.
FLAG = "--text"
_FILE_NAME = "script.py"
# More than anybody writes: an endless pipe must not fill the memory.
_LARGEST_BYTES = 64 << 20


@dataclass(frozen=True)
class PipedScript:
    """A script that was read.

    Args:
        name: As it was given: what the script finds in `sys.argv[0]`.
        folder: What it finds in `sys.path[0]`.
        text: The script.
    """

    name: str
    folder: str
    text: bytes

    def program(self, run_dir: Path, args: Sequence[str]) -> tuple[str, ...]:
        """Returns what each worker runs, for `JobSpec.program`.

        Args:
            run_dir: The run folder.
            args: What the script finds in `sys.argv` behind its name.
        """
        return (FLAG, str(run_dir / _FILE_NAME), self.folder, self.name, *args)

    def write(self, run_dir: Path) -> None:
        """Writes the script to the run folder.

        Args:
            run_dir: The run folder; it is made if need be.

        Raises:
            OptionError: if it cannot be written.
        """
        try:
            make_folder(run_dir)
            write_file(run_dir / _FILE_NAME, self.text)
        except OSError as error:
            raise OptionError(
                explain("The folder for the logs cannot be used.", received=str(error), expected="a folder to write to")
            ) from error


def given_name(program: Sequence[str]) -> str:
    """Returns how a script was named on the command line, whether it came from a pipe or not.

    Args:
        program: What each worker runs.
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
            explain("The script cannot be read.", received=f"{script!r}: {error}", expected="a pipe or a file")
        ) from error


def _whole(script: str, descriptor: int) -> bytes:
    if os.isatty(descriptor):
        raise OptionError(
            explain(
                "The script is to be read from a terminal.",
                received=repr(script),
                expected="a pipe or a file",
                do="Type: tfdistkit run -np 2 - < script.py",
            )
        )
    parts, size = [], 0
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
        size += len(part)
        if size > _LARGEST_BYTES:
            raise OptionError(
                explain("The script does not end.", received=f"more than {_LARGEST_BYTES >> 20} MiB from {script!r}")
            )
    return b"".join(parts)


def _folder(script: str) -> str:
    """Python's `sys.path[0]`: the file's folder where there is a file behind the descriptor, else the pipe's."""
    path = os.path.join(os.getcwd(), script)
    real = os.path.realpath(path)
    if os.path.exists(real):
        return os.path.dirname(real)
    link = os.readlink(path) if os.path.islink(path) else ""
    return os.path.dirname(link if os.path.isabs(link) else path)
