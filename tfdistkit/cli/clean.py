"""Implements `tfdistkit clean`: removes run folders of ended jobs."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tfdistkit.cli.parser import Parser
from tfdistkit.launcher.old_runs import KEPT_DAYS, remove_old_runs

_DESCRIPTION = f"""\
Removes the run folders (logs, events, crash records) that `tfdistkit run` without --log-dir and tfdistkit.launch kept
after a failure. Keeps folders of running jobs, of other users, and those named by --log-dir. Folders of
jobs that ended at least {KEPT_DAYS:g} days ago are removed when the next job starts."""

_EPILOG = """\
examples:
  tfdistkit clean                    all run folders in the folder for temporary files
  tfdistkit clean --older-than 1     only of jobs that ended a day ago or more
  tfdistkit clean --dry-run .        show those of SLURM jobs that were submitted in this folder"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit clean`.

    Returns:
        The exit code.
    """
    parser = make_parser()
    options = parser.parse_args(list(arguments))
    folders = options.folders or [Path(tempfile.gettempdir())]
    for folder in folders:
        if not folder.is_dir():
            parser.error(f"FOLDER must exist. Received: {str(folder)!r}.")
    remove = _leave if options.dry_run else shutil.rmtree
    runs = [run for folder in folders for run in remove_old_runs(folder, options.older_than, None, remove)]
    for run in runs:
        print(f"{run.path}  (ended {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.ended))})")
    count = "1 run folder" if len(runs) == 1 else f"{len(runs)} run folders"
    print(f"{count} of ended jobs {'would be removed' if options.dry_run else 'removed'}.")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command."""
    parser = Parser(
        prog="tfdistkit clean",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    older = "remove only folders of jobs that ended at least DAYS days ago (default: 0)"
    parser.add_argument("--older-than", type=_days, default=0.0, metavar="DAYS", help=older)
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed, and remove nothing")
    where = "parent folders of the run folders (default: the folder for temporary files)"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=where)
    return parser


def _days(text: str) -> float:
    days = float(text)
    if not days >= 0:
        raise ValueError(text)
    return days


_days.__name__ = "number of days"


def _leave(path: Path) -> None:
    """Removes nothing."""
