"""Summarises a failed run on one screen of text, the first cause first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tfdistkit.report.failures import Failure
from tfdistkit.report.hangs.stacks import FILE_NAME as STACKS_FILE
from tfdistkit.report.known_causes import cause_of
from tfdistkit.report.names import ProcessName, listed
from tfdistkit.report.startup_lines import StartupLines

# Lines of a log: a screen has at least 24 lines, and the report needs about ten.
_SHOWN_LINES = 15
_SHOWN_INCIDENTS = 4
# Longest line of a log in characters.
_SHOWN_COLUMNS = 400
# Bytes to read at the end of a log.
_TAIL_BYTES = 32_768

# Signals whose cause is not obvious, with the next step.
_SIGNAL_HINTS = {
    "SIGKILL": "A user or a scheduler killed it, or the kernel did for lack of memory: read `dmesg`.",
    "SIGSEGV": "It crashed in native code: read its log for the stack.",
    "SIGBUS": "It crashed in native code, often because a disk or /dev/shm is full.",
    "SIGABRT": "Native code aborted: read its log for the reason.",
    "SIGILL": "Its native code was built for another processor.",
}


def describe_failure(failure: Failure) -> str:
    """Describes one failure: worker, host, pid, exit code or signal, log, and the end of the traceback.

    Args:
        failure: The failure.

    Returns:
        Several lines without a newline at the end.
    """
    lines = [
        f"{failure.name} {failure.headline} (host {failure.host}, pid {failure.pid}, exit code {failure.exit_code})"
    ]
    if failure.loss or failure.remark:
        lines += [text for text in (failure.loss, failure.remark) if text]
    elif failure.signal in _SIGNAL_HINTS:
        lines.append(_SIGNAL_HINTS[failure.signal])
    if failure.log_path is not None:
        lines.append(f"log: {failure.log_path}")
    title, excerpt = _excerpt(failure)
    if excerpt:
        lines.append(title)
        lines += [f"    {line}" for line in excerpt]
    cause = cause_of(failure)
    return "\n".join([*lines, cause] if cause else lines)


def describe_run(
    failures: Sequence[Failure],
    *,
    suspended: Sequence[ProcessName] = (),
    stopped: Sequence[ProcessName] = (),
    left: Sequence[tuple[ProcessName, int | None]] = (),
    incidents: Sequence[str] = (),
    hang: str = "",
    kept: Path | None = None,
) -> str:
    """Describes why a run failed.

    Args:
        failures: The failures, first cause first, without workers that the launcher stopped.
        suspended: The workers that were suspended (SIGSTOP) when the run failed.
        stopped: The workers that the launcher stopped because of the failure.
        left: The workers that exited with 0 while the others continued, with their steps if known.
        incidents: Earlier failures that the job recovered from, a sentence each.
        hang: Where the ranks were that had not failed, if the job hung or a rank had waited for a peer for too long.
        kept: The run folder, if it is kept for the user.

    Returns:
        Several lines without a newline at the end.
    """
    parts = [_left_early(name, steps, failures) for name, steps in left]
    if failures:
        parts.append(describe_failure(failures[0]))
        if failures[0].is_consequence and not left:
            parts.append("It reports a lost or silent peer, but no worker had failed before it.")
    if hang:
        parts.append(f"Meanwhile {hang}" if failures else hang)
    if suspended:
        parts.append(f"{listed(suspended)} had been suspended (SIGSTOP), which blocked the other processes.")
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
    if hang and kept is not None:
        parts.append(f"The stacks of all their threads: {kept}/**/{STACKS_FILE}")
    if kept is not None:
        parts.append(f"All logs and events: {kept}")
    return "\n".join(parts)


def _left_early(name: ProcessName, steps: int | None, failures: Sequence[Failure]) -> str:
    """Describes a worker that exited with 0 too early: not a failure itself, but the cause of the others'."""
    after = "" if steps is None else f" after {steps} steps"
    other = next((one for one in failures if one.steps is not None), None)
    where = "the others were training" if other is None else f"{other.name} was at step {other.steps}"
    return (
        f"{name} ended with exit code 0{after}, while {where}: its data was shorter, it left `fit`, or its script ends "
        "there. The others cannot continue without it:"
    )


def _is_like(one: Failure, first: Failure) -> bool:
    """Returns whether two failures are alike, as all ranks run the same script."""
    return one.error_type is not None and (one.error_type, one.message) == (first.error_type, first.message)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _when(other: Failure, first: Failure) -> str:
    return "Later" if other.is_consequence or other.time >= first.time else "Before"


def _excerpt(failure: Failure) -> tuple[str, list[str]]:
    """Returns a title and the end of the traceback; without one, the last lines of the log."""
    if failure.traceback and failure.error_type != "SystemExit":
        return "the end of its traceback:", _end_of(failure.traceback)
    if failure.log_path is not None:
        return "the last lines of its log:", _end_of(_shown_end(failure.log_path))
    return "", []


def _end_of(text: str) -> list[str]:
    # A progress bar overwrites its line: keep the last text.
    lines = [line.rstrip("\r\b").rpartition("\r")[2][:_SHOWN_COLUMNS] for line in text.rstrip().split("\n")]
    kept = lines[-_SHOWN_LINES:] if lines != [""] else []
    return ["...", *kept] if len(lines) > _SHOWN_LINES else kept


def _shown_end(path: Path) -> str:
    """Returns the end of a log without TensorFlow's start-up lines."""
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
