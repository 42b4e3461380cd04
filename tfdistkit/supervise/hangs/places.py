"""Describes where a process of a job is in one line, from its progress notes and stacks."""

from __future__ import annotations

import os
import re
import sysconfig

import tfdistkit
from tfdistkit.report.hangs.layout import Notes, Phase
from tfdistkit.report.hangs.stacks import Frame, Thread
from tfdistkit.supervise.hangs.requests import Answer

_OWN = os.path.join(os.path.dirname(os.path.abspath(tfdistkit.__file__)), "")
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen |__autograph_generated_file")
# Keras calls all callbacks from here.
_CALLBACKS = re.compile(r"[/\\]keras[/\\].*[/\\]callback_list\.py$")
_SUSPENDED = "T"
_IN_KERNEL = "D"


def place_of(answer: Answer) -> str:
    """Returns where a process is, as the rest of a sentence: `is in train.py:7 f: callbacks after training step 40`.

    Args:
        answer: Its notes and stacks.
    """
    notes, main = answer.notes, _main_thread(answer)
    if notes is None:
        return "has not begun its script"
    frame = _first_of_user(main)
    when = _when(notes, any(_CALLBACKS.search(one.file) for one in main.frames))
    if answer.state == _SUSPENDED:
        return f"is suspended (SIGSTOP): {when}"
    if notes.is_in_collective:
        call = f"the collective `{notes.call}`" if notes.begun > notes.ended else "a collective"
        return f"waits in {call}, in {frame or 'its script'}: {when}"
    if notes.phase is Phase.STEP:
        source = _source_of_data(answer)
        data = f"waits for data from {source}" if source is not None else "waits, probably for data,"
        return f"{'computes' if answer.is_runnable else data} in {frame or 'its script'}: {when}"
    kernel = ", blocked in the kernel by a disk or a network" if answer.state == _IN_KERNEL else ""
    return f"is in {frame or 'its script'}: {when}{kernel}"


def _main_thread(answer: Answer) -> Thread:
    ident = answer.notes.main_thread if answer.notes is not None else 0
    found = [one for one in answer.threads if one.ident == ident]
    return found[0] if found else Thread(0, ())


def _source_of_data(answer: Answer) -> Frame | None:
    """Returns the innermost call of the user's code outside of the main thread, such as a generator of data."""
    main = _main_thread(answer)
    found = (_first_of_user(thread) for thread in answer.threads if thread.ident != main.ident)
    return next((frame for frame in found if frame is not None), None)


def _first_of_user(thread: Thread) -> Frame | None:
    """Returns the innermost call in code that is neither a library nor Python's own."""
    return next((frame for frame in thread.frames if _is_of_user(frame)), None)


def _is_of_user(frame: Frame) -> bool:
    if _LIBRARY.search(frame.file) or frame.file.startswith((_OWN, *_STANDARD)):
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
    }[notes.phase]
