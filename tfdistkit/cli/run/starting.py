"""Composes the line that says what is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdistkit.launcher.piped_script import given_name
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.report.startup_lines import StartupLines, are_wanted

_SHOWN_HOSTS = 3


def starting_line(job: JobSpec, is_isolated: bool = False) -> str:
    """Returns the line about the start of a job: `starting 2 workers on this machine: train.py`.

    Omits the script's arguments: they can contain secrets.

    Args:
        job: The job.
        is_isolated: Whether it runs in an isolated network.
    """
    what = _count(job.world_size, "worker")
    if job.elastic is not None:
        what += f" ({job.elastic.least} to {job.elastic.most})"
    if job.ps:
        what = f"a coordinator, {what} and {_count(job.ps, 'parameter server')}"
    how = row_of(job.backend).suffix
    is_module = job.program[0] == "-m"
    script = " ".join(job.program[:2]) if is_module else given_name(job.program)
    where = _places(job) + (", in an isolated network" if is_isolated else "")
    return f"tfdistkit: starting {what}{how} on {where}: {script if script.isprintable() else repr(script)}"


def resumption_hint(program: Sequence[str]) -> str:
    """Returns a hint for an elastic job whose script does not name `BackupAndResume`; empty otherwise.

    The callback may come from a module that the script imports: `fit` itself checks for it.

    Args:
        program: The script and its arguments.
    """
    if program[0] == "-m":
        return ""
    try:
        text = Path(program[0]).read_bytes()
    except OSError:  # a folder, or a path on other hosts
        return ""
    if b"BackupAndResume" in text or not program[0].endswith(".py"):
        return ""
    return (
        f"tfdistkit: {Path(program[0]).name} does not name BackupAndResume, which `fit` requires in this job. Unless a "
        'module of yours adds it: callbacks=[tfdistkit.callbacks.BackupAndResume("backup")]'
    )


def hidden_lines(
    wants_all: bool, variables: Mapping[str, str], stream: str = "stderr", has_labels: bool = False
) -> dict[str, Callable[[], StartupLines]]:
    """Returns the filters of `launcher.output.console.Console` for start-up lines, unless they are wanted.

    Args:
        wants_all: Whether to show all lines (`--verbose`).
        variables: The variables of the workers besides this shell's.
        stream: The stream with start-up lines.
        has_labels: See `StartupLines`.
    """
    if wants_all or are_wanted(variables):
        return {}
    return {stream: lambda: StartupLines(has_labels)}


def _count(number: int, name: str) -> str:
    return f"1 {name}" if number == 1 else f"{number} {name}s"


def _places(job: JobSpec) -> str:
    if job.hosts is None:
        return "this machine"
    names = list(dict.fromkeys(slot.host for slot in job.hosts.slots))
    if not names:
        return job.hosts.where
    return ", ".join(names) if len(names) <= _SHOWN_HOSTS else f"{len(names)} hosts"
