"""The words after `tfdistkit run`, as plain data; every mistake in them ends here."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from tfdistkit import env
from tfdistkit.cli import slurm_options
from tfdistkit.cli import host_options
from tfdistkit.errors import nearest
from tfdistkit.launcher.backend import BACKENDS
from tfdistkit.launcher.hosts import HostsSpec

_DESCRIPTION = """\
Starts a script in several worker processes, and watches over them until all have ended: on this machine, or with
-H or --hostfile on others, by ssh.

Each worker finds TF_CONFIG in its environment; in the script, tfdistkit.strategy("multiworker") does the rest.
With --backend horovod or mpi it finds what Horovod needs instead, for tfdistkit.strategy("horovod").
With --ps it starts parameter servers and a coordinator (chief) too, for tfdistkit.strategy("parameter_server").
With --backend slurm all of them are tasks of a job that is submitted to SLURM.

When a worker fails, the others are stopped, and the first failure is told; --max-restarts starts all of them again.
With --ps, a failed worker is started again alone, or else the others go on without it. No process is left behind."""

_EPILOG = """\
examples:
  tfdistkit run -np 2 train.py --epochs 3
  tfdistkit run -np 4 --log-dir logs -m my_package.train
  tfdistkit run -np 2 --dry-run train.py
  tfdistkit run -np 2 --backend horovod train.py
  tfdistkit run --ps 2 -np 4 --max-restarts 3 train.py
  tfdistkit run -H node1:4,node2:4 train.py
  tfdistkit run --backend slurm --nnodes 2 --nproc-per-node 4 --time 1:00:00 --partition gpu train.py

exit codes:
  0 all workers ended well (with --ps: the coordinator did);
  the first failing worker's own code (128 + the signal's number if it was killed);
  2 wrong usage; 124 --timeout or --time; 129, 130, 143 after SIGHUP, Ctrl-C, SIGTERM"""


@dataclass(frozen=True)
class RunOptions:
    """What the user asked for on the command line."""

    np: int
    program: tuple[str, ...]
    env: dict[str, str]
    log_dir: Path | None
    timeout_s: float | None
    threads_per_worker: int | None
    is_dry_run: bool
    is_verbose: bool
    backend: str = "local"
    ps: int = 0
    max_restarts: int = 0
    hosts: HostsSpec | None = None
    mpi_args: tuple[str, ...] = ()
    slurm: slurm_options.SlurmOptions | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


def parse(arguments: Sequence[str]) -> RunOptions:
    """Reads the words after `tfdistkit run`.

    Args:
        arguments: The words.

    Returns:
        What they ask for.

    Raises:
        SystemExit: with 2 for a mistake, with 0 after --help.
    """
    parser = _make_parser()
    found, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        parser.error(f"there is no option {unknown[0]!r}.{nearest(unknown[0].partition('=')[0], known)}")
    # One list, not a script and its arguments: argparse would take the script's own `--` for its own.
    words = found.program[1:] if found.program[:1] == ["--"] else found.program
    if not words:
        parser.error("no script is given. Expected: tfdistkit run -np 2 script.py")
    if found.np is None and found.backend != slurm_options.BACKEND and found.nnodes in (None, 1):
        found.np, found.nproc_per_node, found.nnodes = found.nproc_per_node, None, None  # as torchrun says it
    slurm = slurm_options.read(found, parser.error)
    hosts = host_options.read(found, parser.error)
    if found.np is None and hosts is not None:
        found.np = hosts.total
    if found.np is None:
        parser.error("-np, the number of workers, is missing. It stands before the script.")
    problem = _module_problem(words[0]) if found.module else _script_problem(words[0], words[1:])
    if problem:
        parser.error(problem)
    return RunOptions(
        np=found.np,
        program=("-m", *words) if found.module else tuple(words),
        env=dict([*found.passed, *found.env, *([(env.FULL_TRACEBACK, "1")] if found.full_traceback else [])]),
        log_dir=found.log_dir,
        timeout_s=found.timeout,
        threads_per_worker=found.threads_per_worker,
        is_dry_run=found.dry_run,
        is_verbose=found.verbose,
        backend=found.backend,
        ps=found.ps,
        max_restarts=found.max_restarts,
        hosts=hosts,
        mpi_args=found.mpi_args,
        slurm=slurm,
    )


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="tfdistkit run",
        usage="tfdistkit run -np N [options] script.py [args]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    many = "how many workers (default with hosts: as many as they take)"
    add("-np", "-n", "--num-proc", "--nproc", dest="np", type=int, metavar="N", help=many)
    add("--ps", type=int, default=0, metavar="N", help="how many parameter servers; adds a coordinator")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="after a failure start again, up to N times: all, or with --ps one worker (default: 0)",
    )
    add(
        "--backend",
        choices=[*BACKENDS, slurm_options.BACKEND],
        default="local",
        help="local: TensorFlow's own collectives (default); horovod: Horovod with Gloo; mpi: Horovod with mpirun, "
        "or with --ps roles in MPI's world; slurm: a job of SLURM",
    )
    add("-m", "--module", action="store_true", help="the script is the name of a module, as in `python -m`")
    kept = "keep each worker's output in DIR/rank.<N>/stdout and stderr (with --ps in DIR/<role>.<N>/)"
    add("--log-dir", type=Path, metavar="DIR", help=kept)
    add("--timeout", type=float, metavar="SECONDS", help="stop the whole job after this time")
    add(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the workers; can be given several times",
    )
    add(
        "--threads-per-worker",
        type=int,
        metavar="N",
        help="threads for one TensorFlow operation (default: the cores shared out among the workers)",
    )
    _add_mpi_args(parser)
    slurm_options.add_to(parser)
    host_options.add_to(parser)
    add("--full-traceback", action="store_true", help="show frames of Keras, TensorFlow and tfdistkit in tracebacks")
    add("--dry-run", action="store_true", help="print what would be started, and start nothing")
    add("-v", "--verbose", action="store_true", help="tell what the launcher does")
    add(
        "program",
        nargs=argparse.REMAINDER,
        metavar="script.py [args]",
        help="the script, or with -m the module, and what it finds in sys.argv",
    )
    return parser


def _add_mpi_args(parser: argparse.ArgumentParser) -> None:
    told = "more options for mpirun, with --backend mpi, such as --mpi-args='--mca btl tcp,self'"
    parser.add_argument("--mpi-args", type=_words, default=(), metavar="'ARGS'", help=told)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as {name or 'NAME'}=1, received {text!r}")
    return name, value


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: {text!r}") from None


def _script_problem(script: str, args: Sequence[str]) -> str | None:
    path = Path(script)
    if path.is_file():
        return None if os.access(path, os.R_OK) else f"the script {script!r} cannot be read."
    if path.is_dir():
        return f"{script!r} is a folder. Expected a script, or -m and the name of a module."
    if path.name.startswith("python") and args:
        return f"`{script}` is not needed: write `tfdistkit run -np N {args[0]}` with the script itself."
    here = path.parent if path.parent.is_dir() else Path()
    return f"there is no script {script!r}.{nearest(path.name, [near.name for near in here.glob('*.py')])}"


def _module_problem(module: str) -> str | None:
    # Only the first part: finding a submodule means importing what is around it. As `python -m`, which looks in the
    # current folder first.
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or PathFinder.find_spec(top, [os.getcwd(), *sys.path]):
        return None
    if module.endswith(".py"):
        return f"there is no module {module!r}: -m takes a module's name, without .py."
    return f"there is no module {module!r} in the current folder or among the installed packages."
