"""Explains a hang on one screen: which rank is where, and which ranks the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from tfdistkit.launcher.process_spec import ProcessSpec
from tfdistkit.report.names import ProcessName, listed
from tfdistkit.supervise.hangs.places import place_of
from tfdistkit.supervise.hangs.requests import Answer, ask_for_stacks

_SHOWN_PLACES = 10


def diagnose(processes: Sequence[ProcessSpec]) -> str:
    """Asks processes for their stacks, and describes where they are.

    Args:
        processes: The processes, which run on this machine.
    """
    return describe_places([one.name for one in processes], ask_for_stacks([one.folder for one in processes]))


def describe_places(names: Sequence[ProcessName], answers: Sequence[Answer]) -> str:
    """Describes where the processes of a job are; the ranks that others wait for come first.

    Args:
        names: The processes.
        answers: The current activity of each.

    Returns:
        A line for each place, and one that says which ranks wait for which, without a newline at the end.
    """
    order = sorted(range(len(names)), key=lambda index: (_waits(answers[index]), index))
    at: dict[str, list[ProcessName]] = {}
    for index in order:
        at.setdefault(place_of(answers[index]), []).append(names[index])
    lines = [f"{listed(some)} {place if len(some) == 1 else _plural(place)}" for place, some in at.items()]
    if len(lines) > _SHOWN_PLACES:
        lines[_SHOWN_PLACES:] = [f"... and {len(lines) - _SHOWN_PLACES} more places"]
    return "\n".join([*lines, *_verdict(names, answers)])


def _waits(answer: Answer) -> bool:
    return answer.notes is not None and answer.notes.is_in_collective and answer.state != "T"


def _verdict(names: Sequence[ProcessName], answers: Sequence[Answer]) -> list[str]:
    waiting = [name for name, answer in zip(names, answers) if _waits(answer)]
    others = [name for name in names if name not in waiting]
    if waiting and others:
        verb = "waits" if len(waiting) == 1 else "wait"
        return [f"So {listed(waiting)} {verb} for {listed(others)}."]
    calls = {answer.notes.call for answer in answers if answer.notes is not None and answer.notes.call}
    phases = {answer.notes.phase for answer in answers if answer.notes is not None}
    if waiting and len(names) > 1 and (len(calls) > 1 or len(phases) > 1):
        return ["They wait in different collectives: one rank left out a call of the others, or made another one."]
    return []


def _plural(place: str) -> str:
    """Converts a sentence about one rank to the plural."""
    verb, _, rest = place.partition(" ")
    plural = {"is": "are", "has": "have", "waits": "wait", "waits,": "wait,", "computes": "compute"}.get(verb, verb)
    return f"{plural} {rest}"
