"""Proposes the corrected command for a mistake on the command line."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

# Options for the number of workers, of `tfdistkit run` and of other launchers.
WORKERS = ("-np", "-n", "--num-proc", "--nproc", "--nproc-per-node", "--nproc_per_node")
_WORKERS_OF_OTHERS = (
    "--np", "-N", "-p", "--num_proc", "--num-procs", "--num_procs", "--nprocs", "--num-processes", "--num_processes",
    "--workers", "--num-workers", "--num_workers", "--world-size", "--world_size", "--num-gpus", "--num_gpus",
)  # fmt: skip
# Options that imply the number of workers: hosts, or SLURM's nodes.
_INSTEAD = ("-H", "--host", "--hostfile", "--nnodes")
# Command names of other programs -> ours.
_COMMANDS_OF_OTHERS = {
    **dict.fromkeys(("launch", "start", "exec", "train", "submit", "torchrun", "horovodrun", "mpirun"), ("run",)),
    **dict.fromkeys(("check", "diagnose", "test"), ("doctor",)),
    **dict.fromkeys(("manifest", "kubernetes", "kube"), ("k8s", "manifest")),
    **dict.fromkeys(("info", "status", "cluster"), ("env",)),
    **dict.fromkeys(("jobs", "list", "ls"), ("ps",)),
    **dict.fromkeys(("kill", "cancel"), ("stop",)),
    **dict.fromkeys(("log", "tail"), ("logs",)),
    **dict.fromkeys(("stack", "dump"), ("stacks",)),
    "install": ("horovod", "install"),
    "write": ("data", "write"),
    "version": ("--version",),
}
_DEFAULT = "2"
_JOINED = re.compile(r"-np?[0-9]+")
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
# Flags of Python without an argument.
_PYTHON_FLAGS = re.compile(r"-[bBdEiIOPqsSuvx]+")


def type_this(words: Sequence[str]) -> str:
    """Returns the line that proposes a command.

    Args:
        words: What follows `tfdistkit`.
    """
    return f"Type: {shlex.join(['tfdistkit', *words])}"


def guess_command(words: Sequence[str]) -> list[str] | None:
    """Guesses the intended command if the first word is none; returns None without a guess.

    Args:
        words: What follows `tfdistkit`, at least one.
    """
    first, rest = words[0], list(words[1:])
    if not first.startswith("-") and os.path.isfile(f"{first}.py"):
        return ["run", *with_workers([], [f"{first}.py", *rest])]
    if first in _COMMANDS_OF_OTHERS and not _is_program(first):
        found = _COMMANDS_OF_OTHERS[first]
        return ["run", *_numbered(rest)] if found == ("run",) and rest else [*found, *rest]
    if _PYTHON.fullmatch(first) and rest:
        return without_python([], words)
    if (first.isdecimal() and rest) or _is_program(first):
        return ["run", *with_workers([], words)]
    is_of_run = _name(first) in (*WORKERS, *_WORKERS_OF_OTHERS, *_INSTEAD, "-m", "--module", "--ps", "--backend")
    has_program = any(map(_is_program, rest)) or first in ("-m", "--module")
    if is_of_run and not has_program:
        return ["run", "-np", _DEFAULT, "script.py"]
    if is_of_run or (first.startswith("-") and has_program):
        return ["run", *_numbered(words)]
    return None


def without_python(before: Sequence[str], program: Sequence[str]) -> list[str]:
    """Returns the arguments of `run` without `python` before the script.

    Args:
        before: The options before it.
        program: `python`, the script and its arguments; at least two words.
    """
    rest = list(program[1:])
    while len(rest) > 1 and _PYTHON_FLAGS.fullmatch(rest[0]):
        rest.pop(0)
    if rest[0] == "-m":
        return ["run", *_numbered([*before, *rest])]
    return ["run", *(with_workers(before, rest) if not _has_number(before) else [*before, *rest])]


def with_workers(before: Sequence[str], program: Sequence[str]) -> list[str]:
    """Puts the number of workers before the script: the number found after it, or 2.

    Args:
        before: The options before the script.
        program: The script and its arguments.
    """
    if program[0].isdecimal() and len(program) > 1:
        return ["-np", *program[:1], *before, *program[1:]]
    number, after, words = _DEFAULT, [], list(program[1:])
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in (*WORKERS, *_WORKERS_OF_OTHERS) and equals and value.isdecimal():
            number = value
        elif name in (*WORKERS, *_WORKERS_OF_OTHERS) and words and words[0].isdecimal():
            number = words.pop(0)
        else:
            after.append(word)
    return ["-np", number, *before, program[0], *after]


def translate(unknown: str, arguments: Sequence[str]) -> list[str] | None:
    """Replaces another launcher's option for the number of workers by `-np`; returns None for other options.

    Args:
        unknown: The option that `run` does not know.
        arguments: What follows `tfdistkit run`.
    """
    if _name(unknown) not in _WORKERS_OF_OTHERS:
        return None
    return ["run", *_translated(arguments)]


def _numbered(words: Sequence[str]) -> list[str]:
    """Returns the arguments of `run` with a number of workers."""
    ours = _translated(words)
    return ours if _has_number(ours) else ["-np", _DEFAULT, *ours]


def _has_number(words: Sequence[str]) -> bool:
    return any(_name(word) in (*WORKERS, *_INSTEAD) for word in words)


def _translated(words: Sequence[str]) -> list[str]:
    """Translates the options before the script; the script's own are unchanged."""
    ours: list[str] = []
    for place, word in enumerate(words):
        if _is_program(word):
            return [*ours, *words[place:]]
        if _PYTHON.fullmatch(word) and words[place + 1 :] and words[place - 1 : place] != ["--python"]:
            continue
        name, equals, value = word.partition("=")
        ours += (["-np", *([value] if equals else [])]) if name in _WORKERS_OF_OTHERS else [word]
    return ours


def _name(word: str) -> str:
    """Returns the option in a word such as `--np=2` or `-n2`."""
    return _JOINED.sub("-n", word.partition("=")[0])


def _is_program(word: str) -> bool:
    """Returns whether `python` could run it: a script, a zipapp, a folder with a `__main__`, a pipe."""
    if word == "-" or (word.endswith((".py", ".pyz")) and not word.startswith("-")):
        return True
    if os.path.isdir(word):
        return os.path.exists(os.path.join(word, "__main__.py"))
    return os.path.exists(word)
