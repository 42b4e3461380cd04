"""Defines the parser of `tfdistkit run`, with its options for `--help` and `--help-all`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdistkit.cli.parser import Parser, path
from tfdistkit.cli.run import elastic_options, host_options
from tfdistkit.launcher import registry

_SUMMARY = """\
Runs a script in several worker processes, on this machine or on other hosts, and supervises them until all end."""

_DESCRIPTION = """\
Runs a script in several worker processes, and supervises them until all have ended: on this machine, or with -H or
--hostfile on other hosts, by ssh.

Sets TF_CONFIG for each worker; use tfdistkit.strategy("multiworker") in the script.
With --backend horovod or mpi, sets Horovod's variables instead, for tfdistkit.strategy("horovod").
With --ps, starts parameter servers and a coordinator (chief) too, for tfdistkit.strategy("parameter_server").
With --backend ray, runs each worker in an actor of a Ray cluster.
With --backend slurm, submits a job to SLURM whose tasks are these processes.

When a worker fails, the others are stopped, and the first failure is reported; --max-restarts restarts all of them.
With --ps, a failed worker is restarted alone; without restarts left, the others continue. A failed server or
coordinator restarts all processes. With -np MIN:MAX the job continues with fewer workers when some are lost, and with
more when there is room. No process is left running."""

_FEW_EXAMPLES = """\
examples:
  tfdistkit run -np 2 train.py --epochs 3
  tfdistkit run -np 2 -m my_package.train
  tfdistkit run --ps 2 -np 4 --max-restarts 3 train.py
  tfdistkit run -H node1:4,node2:4 train.py

All options, with those for SLURM, more examples and the exit codes: tfdistkit run --help-all"""

_EPILOG = """\
examples:
  tfdistkit run -np 2 train.py --epochs 3
  tfdistkit run -np 4 --log-dir logs -m my_package.train
  tfdistkit run -np 2 --dry-run train.py
  tfdistkit run -np 2 application.pyz
  tfdistkit run -np 2 - < train.py
  tfdistkit run -np 2 --backend horovod train.py
  tfdistkit run --ps 2 -np 4 --max-restarts 3 train.py
  tfdistkit run -H node1:4,node2:4 train.py
  tfdistkit run -np 2:4 --host-discovery-script ./hosts.sh train.py
  tfdistkit run --backend ray --ray-address head:6379 -np 8 train.py
  tfdistkit run --backend slurm --nnodes 2 --nproc-per-node 4 --time 1:00:00 --partition gpu train.py

exit codes:
  0 all workers succeeded (with --ps: the coordinator did);
  the first failing worker's own code (128 + the signal's number if it was killed);
  2 wrong usage; 124 --timeout or --time; 129 SIGHUP; 130 Ctrl-C; 138 SIGUSR1; 143 SIGTERM"""

# Options in `--help`, which fits on one screen; the others are in `--help-all`.
_COMMON = frozenset(
    ("help", "help_all", "np", "ps", "max_restarts", "backend", "module", "log_dir", "timeout", "env", "hosts",
     "dry_run", "verbose", "program")
)  # fmt: skip


class _CommonHelp(argparse.Action):
    """Prints `--help`, after removing the other options: the parser is used for this text only."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.description, parser.epilog = _SUMMARY, _FEW_EXAMPLES
        for action in parser._actions:
            if action.dest not in _COMMON:
                action.help = argparse.SUPPRESS
        for group in parser._action_groups:
            group.title = group.description = None
        parser.print_help()
        parser.exit()


class _WholeHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.print_help()
        parser.exit()


def make_parser(backend: str = "") -> Parser:
    """Makes the parser of the command.

    Args:
        backend: The backend of the command line: options of one of another package are added for it alone.
    """
    parser = Parser(
        prog="tfdistkit run",
        usage="tfdistkit run -np N [options] script.py [args]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action=_CommonHelp, nargs=0, help="show the common options")
    add("--help-all", action=_WholeHelp, nargs=0, help="show all options")
    workers = "the number of workers, or MIN:MAX if it may change (default with hosts: the sum of their slots)"
    add("-np", "-n", "--num-proc", "--nproc", dest="np", type=_workers, metavar="N", help=workers)
    add("--ps", type=int, default=0, metavar="N", help="the number of parameter servers; adds a coordinator")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart the job after a failure up to N times; with --ps a failed worker alone (default: 0)",
    )
    add(
        "--backend",
        choices=registry.names(),
        default="local",
        help="local: TensorFlow's own collectives (default); horovod: Horovod with Gloo; mpi: Horovod with mpirun, "
        "or with --ps roles in MPI's world; ray: actors of a Ray cluster; slurm: a job of SLURM",
    )
    add("-m", "--module", action="store_true", help="the script is the name of a module, as in `python -m`")
    kept = "keep each worker's output in DIR/rank.<N>/stdout and stderr (with --ps in DIR/<role>.<N>/)"
    add("--log-dir", type=path, metavar="DIR", help=kept)
    add("--timeout", type=float, metavar="SECONDS", help="timeout of the whole job")
    add(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the workers; can be given several times",
    )
    _add_rest(parser)
    elastic_options.add_to(parser)
    for module in reversed(registry.own_options(backend)):
        module.add_to(parser)
    host_options.add_to(parser)
    add("--dry-run", action="store_true", help="print the commands, and start nothing")
    verbosity = parser.add_mutually_exclusive_group()
    verbosity.add_argument(
        "-v", "--verbose", action="store_true", help="show commands, and TensorFlow's start-up lines"
    )
    verbosity.add_argument("-q", "--quiet", action="store_true", help="show failures only, not what is started")
    add(
        "program",
        nargs=argparse.REMAINDER,
        metavar="script.py [args]",
        help="the script (or a zipapp, a folder with __main__.py, `-` for stdin; with -m a module), and its arguments",
    )
    return parser


def spellings(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the spellings of all options of a parser.

    Args:
        parser: The parser.
    """
    return [name for action in parser._actions for name in action.option_strings]


def _add_rest(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    hang = "stop a job whose ranks make no progress, and say where each is (default: 600 for several ranks; 0: never)"
    add("--hang-timeout", type=float, metavar="SECONDS", help=hang)
    add(
        "--threads-per-worker",
        type=int,
        metavar="N",
        help="threads for one TensorFlow operation (default: the cores divided among the workers)",
    )
    add(
        "--isolate",
        action="store_true",
        help="run in an isolated network, without connections to or from other hosts and processes",
    )
    arguments = "more options for mpirun, with --backend mpi, such as --mpi-args='--mca btl tcp,self'"
    add("--mpi-args", type=_words, default=(), metavar="'ARGS'", help=arguments)
    add("--full-traceback", action="store_true", help="show frames of Keras, TensorFlow and tfdistkit in tracebacks")


def _workers(text: str) -> int | elastic_options.Bounds:
    try:
        return int(text)
    except ValueError:
        pass
    if (bounds := elastic_options.bounds_of(text)) is not None:
        return bounds
    if text[:1] == "p" and text[1:].isdecimal():  # argparse splits `-np2` into `-n p2`
        raise argparse.ArgumentTypeError(f"put a space before the number: `-np {text[1:]}`")
    raise argparse.ArgumentTypeError(f"expected a number of workers, such as `-np 2` or `-np 2:4`, received {text!r}")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as {name or 'NAME'}=1, received {text!r}")
    return name, value


def _words(text: str) -> Sequence[str]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: {text!r}") from None
