"""What the supervisor decides: a table, without processes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tfdistkit.report import CrashRecord
from tfdistkit.supervise import Action, Decision, GroupStatus, Outcome, WorkerStatus, decide
from tfdistkit.supervise.policy import SHUTDOWN_S

NOW = 1000.0
WAIT = Decision(Action.WAIT)
FINISH = Decision(Action.FINISH, Outcome.SUCCEEDED)
FAIL = Decision(Action.STOP, Outcome.FAILED)
TIMED_OUT = Decision(Action.STOP, Outcome.TIMED_OUT)


def running(rank: int = 0) -> WorkerStatus:
    return WorkerStatus(rank, alive_at=NOW)


def ended(code: int, rank: int = 0) -> WorkerStatus:
    return WorkerStatus(rank, code, ended_at=NOW)


def crashed(ago_s: float, code: int | None = None, rank: int = 0) -> WorkerStatus:
    record = CrashRecord(rank, "here", 7, NOW - ago_s, 1, "ValueError", "no", "Traceback ...")
    return WorkerStatus(rank, code, ended_at=None if code is None else NOW, crash=record)


def suspended(ago_s: float, rank: int = 0) -> WorkerStatus:
    return WorkerStatus(rank, alive_at=NOW, suspended_at=NOW - ago_s)


def status(*workers: WorkerStatus, **seen: Any) -> GroupStatus:
    return GroupStatus(workers, **{"now": NOW, "elapsed_s": 10.0, **seen})


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (status(running(), running(1)), WAIT),
        (status(ended(0), running(1)), WAIT),
        (status(ended(0), ended(0, 1)), FINISH),
        (status(ended(0)), FINISH),
        (status(ended(1), running(1)), FAIL),
        (status(running(), ended(-9, 1)), FAIL),
        (status(ended(0), ended(3, 1)), FAIL),
        # It ended with 0 although it had an exception: somebody's os._exit(0) at exit.
        (status(ended(0), crashed(0, code=0, rank=1)), FAIL),
        # An exception is there, but the interpreter is still shutting down.
        (status(crashed(0), running(1)), WAIT),
        (status(crashed(SHUTDOWN_S - 0.1), running(1)), WAIT),
        (status(crashed(SHUTDOWN_S + 0.1), running(1)), FAIL),
        # A single worker makes nobody wait.
        (status(crashed(3600)), WAIT),
        # A suspended worker: only where the others do not notice it, and not for ever.
        (status(suspended(3600), running(1)), WAIT),
        (status(suspended(29), running(1), patience_s=30.0), WAIT),
        (status(suspended(31), running(1), patience_s=30.0), FAIL),
        (status(suspended(31), ended(4, 1), patience_s=30.0), FAIL),
        (status(suspended(3600), patience_s=30.0), WAIT),
        (status(running(), signals=(signal.SIGINT,)), Decision(Action.STOP, Outcome.INTERRUPTED, signal.SIGINT)),
        (status(running(), signals=(1, 15)), Decision(Action.STOP, Outcome.INTERRUPTED, 1)),
        # What came first, or what is over anyway, counts.
        (status(ended(4), running(1), signals=(2,)), FAIL),
        (status(ended(0), signals=(2,)), FINISH),
        (status(running(), timeout_s=10.1), WAIT),
        (status(running(), timeout_s=10.0), TIMED_OUT),
        (status(ended(0), timeout_s=5.0), FINISH),
        (status(ended(4), running(1), timeout_s=5.0), FAIL),
        (status(running(), timeout_s=5.0, signals=(15,)), Decision(Action.STOP, Outcome.INTERRUPTED, 15)),
    ],
)
def test_decisions(seen: GroupStatus, expected: Decision) -> None:
    assert decide(seen) == expected
