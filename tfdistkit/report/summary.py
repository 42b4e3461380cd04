"""A run on one screen of text, the first cause first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tfdistkit.report.failures import Failure
from tfdistkit.report.known_causes import cause_of
from tfdistkit.report.names import ProcessName, listed
from tfdistkit.report.startup_lines import StartupLines

# A screen has 24 lines at least, and the report needs about ten of them itself.
_SHOWN_LINES = 15
_SHOWN_INCIDENTS = 4
# A line of a log can be as long as it likes; a screen cannot.
_SHOWN_COLUMNS = 400
# Where the end of a log is looked for.
_TAIL_BYTES = 32_768

# Signals whose sender is not obvious, and what the user can look at.
_SIGNAL_HINTS = {
    "SIGKILL": "Somebody killed it; without a somebody it was the kernel, out of memory: look at `dmesg`.",
    "SIGSEGV": "It crashed in native code: its log may hold the stack.",
    "SIGBUS": "It crashed in native code, often because a disk or /dev/shm is full.",
    "SIGABRT": "Native code gave up: the reason is in its log.",
    "SIGILL": "It was built for another processor than this one.",
}


def describe_failure(failure: Failure) -> str:
    """Tells one failure: who, host, pid, exit code or signal, log, and the end of the traceback.

    Args:
        failure: What happened.

    Returns:
        Several lines without a newline at the end.
    """
    lines = [
        f"{failure.name} {failure.headline} (host {failure.host}, pid {failure.pid}, exit code {failure.exit_code})"
    ]
    if failure.loss or failure.remark:
        lines += [told for told in (failure.loss, failure.remark) if told]
    elif failure.signal in _SIGNAL_HINTS:
        lines.append(_SIGNAL_HINTS[failure.signal])
    if failure.log_path is not None:
        lines.append(f"log: {failure.log_path}")
    title, told = _last_words(failure)
    if told:
        lines.append(title)
        lines += [f"    {line}" for line in told]
    cause = cause_of(failure)
    return "\n".join([*lines, cause] if cause else lines)


def describe_run(
    failures: Sequence[Failure],
    *,
    suspended: Sequence[ProcessName] = (),
    stopped: Sequence[ProcessName] = (),
    left: Sequence[tuple[ProcessName, int | None]] = (),
    incidents: Sequence[str] = (),
    kept: Path | None = None,
) -> str:
    """Tells why a run failed.

    Args:
        failures: The workers that failed by themselves, first cause first.
        suspended: Those that were found stopped (SIGSTOP) when the run failed.
        stopped: Those that had to be stopped because of the failure.
        left: Those that had ended well while the others went on, and after how many steps as far as that is known.
        incidents: What went wrong before and was overcome, a sentence each.
        kept: The run folder, when the user should know of it.

    Returns:
        Several lines without a newline at the end.
    """
    parts = [_left_early(name, steps, failures) for name, steps in left]
    if failures:
        parts.append(describe_failure(failures[0]))
        if failures[0].is_consequence and not left:
            parts.append("It reports that another worker is gone or silent, but none had failed before it.")
    if suspended:
        parts.append(f"{listed(suspended)} had been suspended (SIGSTOP), so the others waited in vain.")
    # A worker may have failed before the failure that ended the job.
    alike = [one for one in failures[1:] if _is_like(one, failures[0])]
    if alike:
        parts.append(f"{_capital(listed([one.name for one in alike]))} {alike[0].headline} with the same message.")
    others = [one for one in failures[1:] if not _is_like(one, failures[0])]
    parts += [f"{_when(other, failures[0])}, {other.name} {other.headline} too." for other in others[:3]]
    if len(others) > 3:
        parts.append(f"{len(others) - 3} more failed too.")
    if stopped:
        parts.append(f"Stopped because of it: {listed(stopped)}.")
    parts += [f"Earlier: {incident}" for incident in incidents[-_SHOWN_INCIDENTS:]]
    if kept is not None:
        parts.append(f"All logs and events: {kept}")
    return "\n".join(parts)


def _left_early(name: ProcessName, steps: int | None, failures: Sequence[Failure]) -> str:
    """Tells of one that ended well, which is no failure by itself, but the others' end."""
    after = "" if steps is None else f" after {steps} steps"
    other = next((one for one in failures if one.steps is not None), None)
    where = "the others were training" if other is None else f"{other.name} was at step {other.steps}"
    return (
        f"{name} ended with exit code 0{after}, while {where}: its data was shorter, it left `fit`, or its script ends "
        "there. The others cannot go on without it:"
    )


def _is_like(one: Failure, first: Failure) -> bool:
    """Whether two failed in the same way: all ranks run the same script."""
    return one.error_type is not None and (one.error_type, one.message) == (first.error_type, first.message)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _when(other: Failure, first: Failure) -> str:
    return "Later" if other.is_consequence or other.time >= first.time else "Before"


def _last_words(failure: Failure) -> tuple[str, list[str]]:
    """The end of the traceback; without one, the last lines of the log."""
    if failure.traceback and failure.error_type != "SystemExit":
        return "the end of its traceback:", _end_of(failure.traceback)
    if failure.log_path is not None:
        return "the last lines of its log:", _end_of(_told_in(failure.log_path))
    return "", []


def _end_of(text: str) -> list[str]:
    # A progress bar overwrites its line: what counts is what stands there last.
    lines = [line.rstrip("\r\b").rpartition("\r")[2][:_SHOWN_COLUMNS] for line in text.rstrip().split("\n")]
    kept = lines[-_SHOWN_LINES:] if lines != [""] else []
    return ["...", *kept] if len(lines) > _SHOWN_LINES else kept


def _told_in(path: Path) -> str:
    """The end of a log, without what TensorFlow logs at each start."""
    known = StartupLines()
    return known.pass_on(_tail(path)).decode(errors="replace") + known.let_go().decode(errors="replace")


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""
