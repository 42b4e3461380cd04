"""The line that says what is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfdistkit.launcher.piped_script import given_name
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.report.startup_lines import StartupLines, are_wanted

_SHOWN_HOSTS = 3


def starting_line(job: JobSpec, is_isolated: bool = False) -> str:
    """Returns what is started, and where: `starting 2 workers on this machine: train.py`.

    Without the script's arguments: they can hold secrets, and whoever typed them knows them.

    Args:
        job: What the user wants.
        is_isolated: Whether it has a network of its own.
    """
    what = _count(job.world_size, "worker")
    if job.ps:
        what = f"a coordinator, {what} and {_count(job.ps, 'parameter server')}"
    how = row_of(job.backend).suffix
    is_module = job.program[0] == "-m"
    script = " ".join(job.program[:2]) if is_module else given_name(job.program)
    where = _places(job) + (", in a network of its own" if is_isolated else "")
    return f"tfdistkit: starting {what}{how} on {where}: {script if script.isprintable() else repr(script)}"


def hidden_lines(
    wants_all: bool, variables: Mapping[str, str], stream: str = "stderr", has_labels: bool = False
) -> dict[str, Callable[[], StartupLines]]:
    """Returns what a console leaves out, see `launcher.console.Console`: start-up lines, unless somebody wants them.

    Args:
        wants_all: Whether the user asked for everything.
        variables: Those that the workers get besides this shell's.
        stream: Where such lines are.
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
    return ", ".join(names) if len(names) <= _SHOWN_HOSTS else f"{len(names)} hosts"
