"""Describes where a process of a job is in one line, from its progress notes and stacks."""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
from collections.abc import Iterator

import tfdistkit
from tfdistkit.launcher.local.blocked import SOMETHING
from tfdistkit.report.hangs.layout import Notes, Phase
from tfdistkit.report.hangs.stacks import Frame, Thread
from tfdistkit.supervise.hangs.requests import Answer

_OWN = os.path.join(os.path.dirname(os.path.abspath(tfdistkit.__file__)), "")
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_HOROVOD = re.compile(r"[/\\]horovod[/\\](tensorflow|common)[/\\]")
_LIBRARY = re.compile(rf"[/\\](site|dist)-packages[/\\]|{_HOROVOD.pattern}|^<frozen ")
# Functions of the user that TensorFlow converted are in files with this name, and begin with `tf__`.
_CONVERTED = "__autograph_generated_file"
# Functions that AutoGraph adds.
_OF_AUTOGRAPH = re.compile(r"(get_state|set_state|if_body|else_body|loop_body|loop_test|inner_factory)(_\d+)?")
# Keras calls all callbacks from here.
_CALLBACKS = re.compile(r"[/\\]keras[/\\].*[/\\]callback_list\.py$")
# The coordinator of parameter servers waits for steps of its workers here.
_SCHEDULER = os.path.join(_OWN, "strategies", "parameter_server", "scheduler.py"), "_wait_for_room"
_SUSPENDED = "T"
_IN_KERNEL = "D"


def place_of(answer: Answer, is_ahead: bool = False) -> str:
    """Returns where a process is, as the rest of a sentence: `is in train.py:7 f: callbacks after training step 40`.

    Args:
        answer: Its notes and stacks.
        is_ahead: Whether it has begun a step that a peer has not.
    """
    notes, main = answer.notes, _main_thread(answer)
    if notes is None:
        return "has not begun its script"
    frame = _first_of_user(main)
    when = _when(notes, any(_CALLBACKS.search(one.file) for one in main.frames))
    if answer.state == _SUSPENDED:
        what = f"is suspended (SIGSTOP){f' in {frame}' if frame and notes.phase is not Phase.SERVING else ''}: {when}"
    elif notes.phase is Phase.SERVING:
        source = _source_of_data(answer)
        what = f"runs {source} for the coordinator" if source is not None else "serves the coordinator"
    elif is_in_collective(answer):
        call = f"the collective `{notes.call}`" if notes.begun > notes.ended else "a collective"
        what = f"waits in {call}, in {frame or 'its script'}: {when}"
    elif _waits_for_workers(answer):
        what = f"waits for a step of its workers, in {frame or 'its script'}: {when}"
    elif notes.phase is Phase.STEP:
        what = f"{_activity_in_step(answer, is_ahead)} in {frame or 'its script'}: {when}"
    else:
        what = f"is in {frame or 'its script'}: {when}"
    return f"{what}{_kernel(answer)}{_source_of_stack(answer)}"


def waits_for_peers(answer: Answer) -> bool:
    """Returns whether a process waits for other processes of its job.

    Args:
        answer: Its notes and stacks.
    """
    notes = answer.notes
    if notes is None or answer.state == _SUSPENDED:
        return False
    is_idle = notes.phase is Phase.SERVING and not answer.blocked and _source_of_data(answer) is None
    return is_idle or is_in_collective(answer) or _waits_for_workers(answer)


def is_in_collective(answer: Answer) -> bool:
    """Returns whether a process waits in a collective: one that is noted, or one of Horovod outside of a compiled step.

    Args:
        answer: Its notes and stacks.
    """
    return answer.notes is not None and (answer.notes.is_in_collective or _waits_for_horovod(answer))


def _waits_for_horovod(answer: Answer) -> bool:
    return any(_HOROVOD.search(one.file) for one in _before_user(_main_thread(answer)))


def _waits_for_workers(answer: Answer) -> bool:
    return any((one.file, one.function) == _SCHEDULER for one in _before_user(_main_thread(answer)))


def call_of(answer: Answer) -> tuple[str, Phase | None, str]:
    """Returns what tells a collective from another one: ranks that wait in the same one have the same.

    Args:
        answer: The notes and stacks of a process.
    """
    call, phase = (answer.notes.call, answer.notes.phase) if answer.notes is not None else ("", None)
    return call, phase, str(_first_of_user(_main_thread(answer))) if _waits_for_horovod(answer) else ""


def _activity_in_step(answer: Answer, is_ahead: bool) -> str:
    source = _source_of_data(answer)
    if answer.is_runnable:
        return "computes"
    if source is not None:
        return f"waits for data from {source}"
    if any(call.startswith("reading") for call in answer.blocked):
        return "waits for data"
    if is_ahead:
        return "waits, probably for the other ranks,"
    # Horovod's collectives in a step are not noted, so this may be one.
    has_horovod = answer.notes is not None and answer.notes.polling
    return "waits, for data or the other ranks," if has_horovod else "waits, probably for data,"


def _kernel(answer: Answer) -> str:
    if answer.blocked and answer.blocked != (SOMETHING,):
        more = f" and {len(answer.blocked) - 1} more" if len(answer.blocked) > 1 else ""
        return f", blocked in the kernel {answer.blocked[0]}{more}"
    return f", blocked in the kernel by {SOMETHING}" if answer.blocked or answer.state == _IN_KERNEL else ""


def _source_of_stack(answer: Answer) -> str:
    if answer.is_spied and answer.notes is not None and answer.notes.phase is not Phase.SERVING:
        return " (stack read by py-spy)"
    # A suspended process never answers, which its state explains.
    return f" (no stack: {answer.no_stack})" if answer.no_stack and answer.state != _SUSPENDED else ""


def _main_thread(answer: Answer) -> Thread:
    ident = answer.notes.main_thread if answer.notes is not None else 0
    found = [one for one in answer.threads if one.ident == ident]
    return found[0] if found else Thread(0, ())


def _source_of_data(answer: Answer) -> str | None:
    """Returns the innermost call of the user's code outside of the main thread, such as a generator of data."""
    main = _main_thread(answer)
    others = [thread for thread in answer.threads if thread.ident != main.ident]
    found = next((frame for thread in others if (frame := _first_of_user(thread)) is not None), None)
    if found is not None:
        return str(found)
    converted = (frame.function for thread in others for frame in thread.frames if _CONVERTED in frame.file)
    # A function inside of another one keeps its name.
    function = next((name.removeprefix("tf__") for name in converted if not _OF_AUTOGRAPH.fullmatch(name)), None)
    return None if function is None else f"the function `{function}`"


def _first_of_user(thread: Thread) -> Frame | None:
    """Returns the innermost call in code that is neither a library nor Python's own."""
    return next((frame for frame in thread.frames if _is_of_user(frame)), None)


def _before_user(thread: Thread) -> Iterator[Frame]:
    """Yields the calls that the innermost code of the user makes, the innermost first."""
    return itertools.takewhile(lambda frame: not _is_of_user(frame), thread.frames)


def _is_of_user(frame: Frame) -> bool:
    if _LIBRARY.search(frame.file) or frame.file.startswith((_OWN, *_STANDARD)) or _CONVERTED in frame.file:
        return False
    return frame.file != "<string>"


def _when(notes: Notes, is_in_callbacks: bool) -> str:
    after = f"after training step {notes.steps} (epoch {notes.epoch + 1})"
    return {
        Phase.START: "before its strategy is made",
        Phase.SETUP: "before `fit`",
        Phase.STEP: f"training step {notes.steps + 1} (epoch {notes.epoch + 1})",
        Phase.BETWEEN: f"{'callbacks' if is_in_callbacks else 'between steps,'} {after}",
        Phase.EVALUATION: f"an evaluation or prediction {after}",
        Phase.SAVE: f"saving a checkpoint or backup {after}",
        Phase.OUTSIDE: f"outside of `fit`, after training step {notes.steps}",
        Phase.SERVING: "serving the coordinator",
    }[notes.phase]
