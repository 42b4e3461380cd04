"""Completes commands, options, choices and files on TAB in the shell, by argcomplete."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
from collections.abc import Mapping

# argcomplete's protocol: the number of words before the arguments, the line, and the cursor's offset in bytes.
_WORDS_BEFORE, _LINE, _POINT = "_ARGCOMPLETE", "COMP_LINE", "COMP_POINT"


def complete(commands: Mapping[str, tuple[str, str]]) -> None:
    """Prints the proposals and exits the process; returns if argcomplete is not installed.

    Args:
        commands: Name -> (module with `make_parser`, summary).
    """
    try:
        import argcomplete
    except ImportError:
        return
    skipped = int(os.environ[_WORDS_BEFORE])
    words = _words_before_cursor()[skipped:]
    if words and words[0] in commands:
        # The command's own parser treats the command as the program.
        os.environ[_WORDS_BEFORE] = str(skipped + 1)
        parser = importlib.import_module(commands[words[0]][0]).make_parser()
    else:
        parser = argparse.ArgumentParser(prog="tfdistkit", allow_abbrev=False)
        parser.add_argument("--version", action="store_true")
        parser.add_argument("command", choices=list(commands))
    argcomplete.autocomplete(parser, always_complete_options="long")


def _words_before_cursor() -> list[str]:
    """Returns the complete words before the one at the cursor."""
    line = os.environ.get(_LINE, "").encode()[: int(os.environ.get(_POINT, "0"))].decode(errors="ignore")
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is still open
        words = line.split()
    return words if line[-1:].isspace() else words[:-1]
