"""What the shell offers on TAB, by argcomplete: commands, options and choices, and files where nothing else fits."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
from collections.abc import Mapping

# argcomplete's protocol: how many words stand before the arguments, the line, and the cursor's place in it in bytes.
_WORDS_BEFORE, _LINE, _POINT = "_ARGCOMPLETE", "COMP_LINE", "COMP_POINT"


def complete(commands: Mapping[str, tuple[str, str]]) -> None:
    """Answers the shell and ends the process; comes back where argcomplete is not installed.

    Args:
        commands: Name -> (module with `make_parser`, what it does).
    """
    try:
        import argcomplete
    except ImportError:
        return
    skipped = int(os.environ[_WORDS_BEFORE])
    words = _words_before_cursor()[skipped:]
    if words and words[0] in commands:
        # The command's own parser sees the line as if the command were the program.
        os.environ[_WORDS_BEFORE] = str(skipped + 1)
        parser = importlib.import_module(commands[words[0]][0]).make_parser()
    else:
        parser = argparse.ArgumentParser(prog="tfdistkit", allow_abbrev=False)
        parser.add_argument("--version", action="store_true")
        parser.add_argument("command", choices=list(commands))
    argcomplete.autocomplete(parser, always_complete_options="long")


def _words_before_cursor() -> list[str]:
    """The whole words that stand before the one which is typed."""
    line = os.environ.get(_LINE, "").encode()[: int(os.environ.get(_POINT, "0"))].decode(errors="ignore")
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is still open
        words = line.split()
    return words if line[-1:].isspace() else words[:-1]
