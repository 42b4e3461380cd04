"""The supervision policy as a table of statuses and decisions, without processes."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from tfdistkit.report import CrashRecord
from tfdistkit.supervise import Action, Decision, GroupStatus, Outcome, WorkerStatus, decide
from tfdistkit.supervise.coordinated import LEFT_EARLY_S, SUSPENDED_S
from tfdistkit.supervise.status import SHUTDOWN_S

NOW = 1000.0
WAIT = Decision(Action.WAIT)
FINISH = Decision(Action.FINISH, Outcome.SUCCEEDED)
FAIL = Decision(Action.STOP, Outcome.FAILED)
TIMED_OUT = Decision(Action.STOP, Outcome.TIMED_OUT)
RESTART = Decision(Action.RESTART, Outcome.FAILED)
INTERRUPTED = Decision(Action.STOP, Outcome.INTERRUPTED, signal.SIGINT)


def running(rank: int = 0) -> WorkerStatus:
    return WorkerStatus(rank, alive_at=NOW)


def ended(code: int, rank: int = 0) -> WorkerStatus:
    return WorkerStatus(rank, code, ended_at=NOW)


def crashed(ago_s: float, code: int | None = None, rank: int = 0) -> WorkerStatus:
    record = CrashRecord(rank, "here", 7, NOW - ago_s, 1, "ValueError", "no", "Traceback ...")
    return WorkerStatus(rank, code, ended_at=None if code is None else NOW, crash=record, crashed_at=record.time)


def suspended(ago_s: float, rank: int = 0) -> WorkerStatus:
    return WorkerStatus(rank, alive_at=NOW, suspended_at=NOW - ago_s)


def status(*workers: WorkerStatus, **seen: Any) -> GroupStatus:
    return GroupStatus(workers, **{"now": NOW, "elapsed_s": 10.0, **seen})


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (status(running(), running(1)), WAIT),
        (status(running(), running(1), is_hung=True), FAIL),
        (status(running(), running(1), is_hung=True, signals=(signal.SIGINT,)), INTERRUPTED),
        (status(running(), running(1), is_hung=True, restarts_left=1), RESTART),
        (status(ended(0), ended(0, 1), is_hung=True), FINISH),
        (status(ended(0), running(1)), WAIT),
        (status(ended(0), ended(0, 1)), FINISH),
        (status(ended(0)), FINISH),
        (status(ended(1), running(1)), FAIL),
        (status(running(), ended(-9, 1)), FAIL),
        (status(ended(0), ended(3, 1)), FAIL),
        # It ended with 0 although it had an exception: an os._exit(0) at exit.
        (status(ended(0), crashed(0, code=0, rank=1)), FAIL),
        # An exception is there, but the interpreter is still shutting down.
        (status(crashed(0), running(1)), WAIT),
        (status(crashed(SHUTDOWN_S - 0.1), running(1)), WAIT),
        (status(crashed(SHUTDOWN_S + 0.1), running(1)), FAIL),
        # A single worker has no waiting peers.
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


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (status(running(), ended(-9, 1), restarts_left=1), RESTART),
        (status(running(), crashed(SHUTDOWN_S + 1, rank=1), restarts_left=1), RESTART),
        (status(suspended(31), running(1), patience_s=30.0, restarts_left=3), RESTART),
        (status(running(), ended(-9, 1), restarts_left=0), FAIL),
        (status(ended(1), restarts_left=1), RESTART),
        (status(ended(0), ended(0, 1), restarts_left=1), FINISH),
        # The user and the clock end a job for good.
        (status(running(), ended(-9, 1), restarts_left=1, signals=(2,)), FAIL),
        (status(running(), ended(-9, 1), restarts_left=1, timeout_s=5.0), FAIL),
        (status(running(), restarts_left=1, signals=(2,)), INTERRUPTED),
        (status(running(), restarts_left=1, timeout_s=5.0), TIMED_OUT),
    ],
)
def test_a_failure_restarts_while_restarts_are_left(seen: GroupStatus, expected: Decision) -> None:
    assert decide(seen) == expected


# With parameter servers: chief 0, workers 1 and 2, servers 3 and 4.

TWO = (running(), running(1))


def cast(
    chief: WorkerStatus | None = None,
    workers: tuple[WorkerStatus, ...] = TWO,
    servers: tuple[WorkerStatus, ...] = TWO,
    **seen: Any,
) -> GroupStatus:
    roles = {"chief": (chief or running(),), "worker": workers, "ps": servers}
    return status(*(replace(one, role=role) for role, members in roles.items() for one in members), **seen)


def given_up(rank: int = 0) -> WorkerStatus:
    return replace(ended(-9, rank), is_given_up=True)


def left(ago_s: float, rank: int = 0, code: int = 0) -> WorkerStatus:
    return WorkerStatus(rank, code, ended_at=NOW - ago_s)


def stop(*indices: int) -> Decision:
    return Decision(Action.STOP, Outcome.FAILED, indices=indices)


def restart(*indices: int) -> Decision:
    return Decision(Action.RESTART, Outcome.FAILED, indices=indices)


def care(action: Action, *indices: int) -> Decision:
    return Decision(action, indices=indices)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (cast(), WAIT),
        # The coordinator's end is the end.
        (cast(ended(0)), FINISH),
        (cast(ended(0), workers=(ended(-9), crashed(9, 1, 1)), servers=(ended(-9), running(1))), FINISH),
        (cast(ended(0), restarts_left=1), FINISH),
        (cast(ended(3)), stop(0)),
        (cast(ended(-9)), stop(0)),
        (cast(ended(-9), restarts_left=1), restart(0)),
        (cast(crashed(SHUTDOWN_S - 1)), WAIT),
        (cast(crashed(SHUTDOWN_S + 1)), stop(0)),
        # Nobody can go on without a server.
        (cast(servers=(running(), ended(-9, 1))), stop(4)),
        (cast(servers=(running(), ended(-9, 1)), restarts_left=2), restart(4)),
        (cast(ended(1), servers=(ended(-9), running(1))), stop(0, 3)),
        (cast(workers=(ended(-9), running(1)), servers=(crashed(SHUTDOWN_S + 1), running(1))), stop(3)),
        # A worker is replaced, or done without.
        (cast(workers=(running(), ended(-9, 1))), care(Action.GIVE_UP, 2)),
        (cast(workers=(running(), ended(1, 1)), restarts_left=1), care(Action.REPLACE, 2)),
        (cast(workers=(running(), crashed(1, rank=1)), restarts_left=1), WAIT),
        (cast(workers=(running(), crashed(SHUTDOWN_S + 1, rank=1)), restarts_left=1), care(Action.REPLACE, 2)),
        (cast(workers=(ended(-9), ended(-9, 1)), restarts_left=2), care(Action.REPLACE, 1, 2)),
        (cast(workers=(ended(-9), ended(-9, 1)), restarts_left=1), care(Action.REPLACE, 1)),
        # It is restarted after the backoff; until then the job continues, and signals count.
        (cast(workers=(running(), left(1, 1, 9)), restarts_left=1, restart_wait_s=2.0), WAIT),
        (cast(workers=(running(), left(3, 1, 9)), restarts_left=1, restart_wait_s=2.0), care(Action.REPLACE, 2)),
        (cast(workers=(left(1, 0, 9), left(3, 1, 9)), restarts_left=2, restart_wait_s=2.0), care(Action.REPLACE, 2)),
        (cast(workers=(running(), left(1, 1, 9)), restarts_left=1, restart_wait_s=2.0, signals=(2,)), INTERRUPTED),
        (cast(workers=(running(), crashed(9, rank=1)), restarts_left=1, restart_wait_s=60.0), WAIT),
        (cast(workers=(suspended(99), left(1, 1, 9)), restarts_left=1, restart_wait_s=2.0), care(Action.KILL, 1)),
        # All were given up although restarts are left: they failed in the same place again.
        (cast(workers=(given_up(), given_up(1)), restarts_left=3), stop(1, 2)),
        (cast(workers=(running(), given_up(1))), WAIT),
        (cast(workers=(running(), given_up(1)), restarts_left=1), WAIT),
        # Nobody is left to do the work.
        (cast(workers=(ended(-9), given_up(1))), stop(1, 2)),
        (cast(workers=(ended(-9), ended(1, 1))), stop(1, 2)),
        (cast(workers=(ended(-9),)), stop(1)),
        # A suspended worker is killed, and then handled as any dead worker. The coordinator may stay suspended.
        (cast(workers=(running(), suspended(SUSPENDED_S - 1, 1))), WAIT),
        (cast(workers=(running(), suspended(SUSPENDED_S + 1, 1))), care(Action.KILL, 2)),
        (cast(servers=(suspended(SUSPENDED_S + 1), running(1))), care(Action.KILL, 3)),
        (cast(suspended(3600)), WAIT),
        # It ended well although the coordinator is there: for a moment that is as it should be.
        (cast(workers=(left(LEFT_EARLY_S - 1), running(1))), WAIT),
        (cast(workers=(left(LEFT_EARLY_S + 1), running(1))), stop(1)),
        (cast(servers=(left(LEFT_EARLY_S + 1), running(1)), restarts_left=1), stop(3)),
        (cast(workers=(left(LEFT_EARLY_S + 1), running(1)), servers=(left(1), running(1))), stop(1, 3)),
        (cast(ended(0), workers=(left(3600), running(1))), FINISH),
        # The user and the clock.
        (cast(signals=(2,)), INTERRUPTED),
        (cast(timeout_s=5.0), TIMED_OUT),
        (cast(ended(4), signals=(2,), restarts_left=1), stop(0)),
        (cast(workers=(running(), ended(-9, 1)), restarts_left=1, signals=(2,)), INTERRUPTED),
        (cast(workers=(running(), ended(-9, 1)), restarts_left=1, timeout_s=5.0), TIMED_OUT),
        (cast(ended(0), timeout_s=5.0, signals=(2,)), FINISH),
    ],
)
def test_decisions_with_parameter_servers(seen: GroupStatus, expected: Decision) -> None:
    assert decide(seen) == expected


RESIZE = Decision(Action.RESIZE, Outcome.INTERRUPTED)
LEFT = -signal.SIGUSR1


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (status(ended(LEFT), running(1), is_elastic=True, is_asked=True), RESIZE),
        (status(ended(LEFT), ended(-9, 1), is_elastic=True, is_asked=True), RESIZE),
        (status(ended(LEFT), running(1), is_elastic=True, is_asked=True, signals=(signal.SIGINT,)), INTERRUPTED),
        (status(running(), running(1), is_elastic=True, is_asked=True), WAIT),
        (status(ended(0), ended(0, 1), is_elastic=True, is_asked=True), FINISH),
        (status(ended(LEFT), running(1), is_elastic=True), RESTART),
        (status(ended(LEFT), running(1)), FAIL),
        (status(ended(-9), running(1), is_elastic=True), RESTART),
        (status(ended(-9), running(1), is_elastic=True, timeout_s=1.0), FAIL),
    ],
)
def test_elastic_jobs(seen: GroupStatus, expected: Decision) -> None:
    assert decide(seen) == expected
