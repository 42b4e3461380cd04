"""The parser of all commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

USAGE_EXIT_CODE = 2


class Parser(argparse.ArgumentParser):
    """Exits with one line for an error, and with the next step."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_EXIT_CODE, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


def path(text: str) -> Path:
    """Returns a path given on the command line; an empty one, such as an unset variable leaves, is an error."""
    if not text:
        raise ValueError(text)
    return Path(text)
