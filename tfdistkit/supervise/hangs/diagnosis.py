"""Explains a hang on one screen: which rank is where, and which ranks the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from tfdistkit.launcher.process_spec import ProcessSpec
from tfdistkit.report.hangs.layout import IN_FIT, Phase
from tfdistkit.report.names import ProcessName, listed
from tfdistkit.supervise.hangs.missing_calls import MissingCalls, described, missing_calls, waits_in
from tfdistkit.supervise.hangs.places import call_of, is_in_collective, place_of, waits_for_peers
from tfdistkit.supervise.hangs.requests import Answer, ask_for_stacks

_SHOWN_PLACES = 10


def diagnose(processes: Sequence[ProcessSpec]) -> str:
    """Asks processes for their stacks, and describes where they are.

    Args:
        processes: The processes, which run on this machine.
    """
    folders = [one.folder for one in processes]
    answers = ask_for_stacks(folders)
    return describe_places([one.name for one in processes], answers, missing_calls(folders, answers))


def describe_places(names: Sequence[ProcessName], answers: Sequence[Answer], missing: MissingCalls) -> str:
    """Describes where the processes of a job are; the ranks that others wait for come first.

    Args:
        names: The processes.
        answers: The current activity of each.
        missing: What `missing_calls` found.

    Returns:
        A line for each place, and one that says which ranks wait for which, without a newline at the end.
    """
    is_ahead = [ahead or waits_in(missing, name) for name, ahead in zip(names, _ahead(answers), strict=True)]
    waits = [waits_for_peers(one) or ahead for one, ahead in zip(answers, is_ahead)]
    order = sorted(range(len(names)), key=lambda index: (waits[index], index))
    at: dict[str, list[ProcessName]] = {}
    for index in order:
        at.setdefault(place_of(answers[index], is_ahead[index]), []).append(names[index])
    lines = [f"{listed(some)} {place if len(some) == 1 else _plural(place)}" for place, some in at.items()]
    if len(lines) > _SHOWN_PLACES:
        lines[_SHOWN_PLACES:] = [f"... and {len(lines) - _SHOWN_PLACES} more places"]
    return "\n".join([*lines, *_verdict(names, answers, waits, missing)])


def _ahead(answers: Sequence[Answer]) -> list[bool]:
    """Returns which processes wait in a step that a peer has not begun, where collectives are not noted (Horovod)."""
    notes = [one.notes for one in answers if one.notes is not None and one.notes.phase in IN_FIT]
    if len(notes) < len(answers) or not all(one.polling for one in notes):
        return [False] * len(answers)
    begun = [(one.epoch, one.begun_steps) for one in notes]
    return [
        begun[index] > min(begun) and notes[index].phase is Phase.STEP and not (one.is_runnable or one.blocked)
        for index, one in enumerate(answers)
    ]


def _verdict(
    names: Sequence[ProcessName], answers: Sequence[Answer], waits: Sequence[bool], missing: MissingCalls
) -> list[str]:
    waiting = [name for name, one in zip(names, waits) if one]
    others = [name for name, one in zip(names, waits) if not one]
    if waiting and others:
        verb = "waits" if len(waiting) == 1 else "wait"
        return [f"So {listed(waiting)} {verb} for {listed(others)}."]
    if waiting and missing:
        return [described(missing)]
    if waiting and all(is_in_collective(one) for one in answers) and len({call_of(one) for one in answers}) > 1:
        return ["They wait in different collectives: one rank left out a call of the others, or made another one."]
    return []


def _plural(place: str) -> str:
    """Converts a sentence about one rank to the plural."""
    verb, _, rest = place.partition(" ")
    plural = {"is": "are", "has": "have", "waits,": "wait,"}.get(verb) or verb.removesuffix("s")
    return f"{plural} {rest}"
