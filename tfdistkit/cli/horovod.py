"""Implements `tfdistkit horovod`: builds and installs Horovod for this environment, and checks it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

from tfdistkit.cli.parser import Parser
from tfdistkit.errors import TfdistkitError
from tfdistkit.horovod_build.checking import check_horovod, status_text
from tfdistkit.horovod_build.installing import install_horovod, plan_build, plan_text
from tfdistkit.horovod_build.prerequisites import look_at_needs, missing_text
from tfdistkit.horovod_build.wheels import WheelCache

_DESCRIPTION = """\
Horovod's last release does not build against current TensorFlow. `install` builds it from its source distribution,
without its optional operations for XLA; `check` shows the installed build and whether it loads."""

_EPILOG = """\
examples:
  tfdistkit horovod install               Gloo, and MPI where it is installed
  tfdistkit horovod install --dry-run     show the steps, and what is missing
  tfdistkit horovod check

exit codes:
  0 Horovod works; 1 it does not, or a step failed; 2 wrong usage"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit horovod`.

    Returns:
        The exit code, see `tfdistkit horovod --help`.
    """
    options = make_parser().parse_args(list(arguments))
    python = shutil.which(options.python) or options.python
    try:
        if options.action == "check":
            status = check_horovod(python)
            print(status_text(status, python))
            return 0 if status.is_good else 1
        return _install(python, options)
    except TfdistkitError as error:
        print(f"tfdistkit horovod {options.action}: {error}", file=sys.stderr)
        return 1


def _install(python: str, options: argparse.Namespace) -> int:
    plan = plan_build(python, with_mpi=options.with_mpi, with_nccl=options.with_nccl)
    cache = WheelCache()
    if options.dry_run:
        print(plan_text(plan, cache))
        missing = cache.find(plan.name) is None and missing_text(
            look_at_needs(plan.options, plan.target, plan.variables)
        )
        return 1 if missing else 0
    status = install_horovod(plan, cache, lambda line: print(line, flush=True))
    print(status_text(status, python))
    return 0


def make_parser() -> Parser:
    """Makes the parser of the command."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="tfdistkit horovod",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=form,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="install | check")
    install = actions.add_parser("install", help="build Horovod for this environment, and install it")
    mpi = install.add_mutually_exclusive_group()
    mpi.add_argument("--with-mpi", dest="with_mpi", action="store_true", default=None, help="with MPI")
    mpi.add_argument(
        "--without-mpi",
        dest="with_mpi",
        action="store_false",
        help="without MPI (default: with MPI if it is installed)",
    )
    install.add_argument("--with-nccl", action="store_true", help="with NCCL, for GPUs; needs the CUDA toolkit")
    install.add_argument("--dry-run", action="store_true", help="print the steps, and change nothing")
    check = actions.add_parser(
        "check", help="show the build options, the TensorFlow version of the build, and whether it loads"
    )
    for each in (install, check):
        each.add_argument(
            "--python", default=sys.executable, metavar="PATH", help="the environment's Python (default: this one)"
        )
    return parser
