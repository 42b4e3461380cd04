"""A look at one worker, and what is known of it when it failed."""

from __future__ import annotations

import time
from dataclasses import replace

from tfdistkit.launcher.backend import WorkerHandle
from tfdistkit.report.crashes import read_crash
from tfdistkit.report.failures import Failure, signal_name
from tfdistkit.supervise.status import WorkerStatus

# A launcher that was itself held up for longer (Ctrl-Z) has not seen what was suspended meanwhile, and for how long.
_LONGEST_BLINK_S = 5.0


def look_at(worker: WorkerHandle, before: WorkerStatus) -> WorkerStatus:
    """Looks at a worker.

    Args:
        worker: The worker.
        before: What was seen of it before.

    Returns:
        What is seen now.
    """
    now, moment = time.monotonic(), time.time()
    # In this order: a worker writes its record before it ends.
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


def failure_of(worker: WorkerHandle, seen: WorkerStatus, remark: str = "") -> Failure:
    """Puts together what is known of a worker that failed.

    Args:
        worker: The worker.
        seen: What was seen of it.
        remark: What the launcher knows besides.

    Returns:
        Its failure.
    """
    spec, crash = worker.spec, seen.crash
    killed_by = -seen.exit_code if seen.exit_code is not None and seen.exit_code < 0 else None
    failure = Failure(
        rank=spec.name.index,
        host=worker.host,
        pid=worker.pid,
        exit_code=128 + killed_by if killed_by else (seen.exit_code or 0),
        # Peers notice a killed worker within a millisecond and write the exact time of their own exception; the
        # launcher notices it somewhat later.
        time=seen.alive_time if killed_by else (seen.ended_time or seen.alive_time),
        signal=signal_name(killed_by) if killed_by else None,
        log_path=spec.stderr_path,
        role=spec.name.role,
        remark=remark,
    )
    if crash is None:
        # What became of the process itself, nobody knows.
        loss = worker.loss
        return failure if loss is None else replace(failure, loss=loss.text, time=loss.time)
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
