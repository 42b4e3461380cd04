"""Observe one worker, and describe its failure."""

from __future__ import annotations

import time
from dataclasses import replace

from tfdistkit.launcher.backend import WorkerHandle
from tfdistkit.report.crashes import read_crash
from tfdistkit.report.failures import Failure, signal_name
from tfdistkit.supervise.status import WorkerStatus

# A launcher that was itself suspended for longer (Ctrl-Z) does not know how long its workers were suspended.
_LONGEST_BLINK_S = 5.0


def look_at(worker: WorkerHandle, before: WorkerStatus) -> WorkerStatus:
    """Updates the status of a worker.

    Args:
        worker: The worker.
        before: Its status at the last observation.

    Returns:
        Its status now.
    """
    now, moment = time.monotonic(), time.time()
    # In this order: a worker writes its crash record before it ends.
    exit_code = worker.exit_code()
    crash = before.crash or read_crash(worker.spec.folder)
    crashed_at = before.crashed_at if crash is None or before.crashed_at is not None else now
    if exit_code is not None:
        return replace(
            before, exit_code=exit_code, ended_at=now, ended_time=moment, crash=crash, crashed_at=crashed_at,
            suspended_at=None,
        )  # fmt: skip
    since = before.suspended_at if now - before.alive_at < _LONGEST_BLINK_S else None
    suspended_at = (since or now) if worker.is_suspended() else None
    return replace(
        before, alive_at=now, alive_time=moment, crash=crash, crashed_at=crashed_at, suspended_at=suspended_at
    )


def failure_of(worker: WorkerHandle, status: WorkerStatus, remark: str = "") -> Failure:
    """Describes the failure of a worker.

    Args:
        worker: The worker.
        status: Its last status.
        remark: A remark of the launcher.

    Returns:
        Its failure.
    """
    spec, crash = worker.spec, status.crash
    killed_by = -status.exit_code if status.exit_code is not None and status.exit_code < 0 else None
    failure = Failure(
        rank=spec.name.index,
        host=worker.host,
        pid=worker.pid,
        exit_code=128 + killed_by if killed_by else (status.exit_code or 0),
        # Peers detect a killed worker within a millisecond and record the exact time of their own exception; the
        # launcher detects it later, so it takes the last time at which the worker was alive.
        time=status.alive_time if killed_by else (status.ended_time or status.alive_time),
        signal=signal_name(killed_by) if killed_by else None,
        log_path=spec.stderr_path,
        role=spec.name.role,
        remark=remark,
    )
    if crash is None:
        # The fate of a process on a lost host is unknown.
        loss = worker.loss
        return failure if loss is None else replace(failure, loss=loss.text, time=loss.time, lost_with=loss.lost_with)
    return replace(
        failure,
        host=crash.host,
        pid=crash.pid,
        exit_code=crash.exit_code,
        time=crash.time,
        signal=None,
        error_type=crash.type,
        message=crash.message,
        traceback=crash.traceback,
        kinds=crash.kinds,
        steps=crash.steps,
    )
