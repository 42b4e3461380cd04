"""How long restarts wait, and which failures are the same."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tfdistkit.report.failures import Failure
from tfdistkit.supervise import restarting
from tfdistkit.supervise.restarting import Backoff, Repeats, is_same_failure, pause
from tfdistkit.supervise.result import History

FAILURE = Failure(
    rank=0,
    host="here",
    pid=1,
    exit_code=1,
    time=1.0,
    error_type="TypeError",
    message="no <object at 0x7f01>",
    traceback='Traceback (most recent call last):\n  File "x.py", line 3, in f\nTypeError: no <object at 0x7f01>\n',
    kinds=("builtins.TypeError", "builtins.Exception"),
)


def test_restarts_wait_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(restarting.time, "monotonic", lambda: now)
    monkeypatch.setattr(restarting, "_JITTER", 0.0)
    backoff, waits = Backoff(), []
    for _ in range(9):
        waits.append(backoff.wait_s)
        backoff.count()
        now += 20.0
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    for _ in range(5000):
        backoff.count()
    assert backoff.wait_s == 60
    now += 400.0
    assert backoff.wait_s == 1, "all went well for a while"
    backoff.count()
    assert backoff.wait_s == 2


def test_waits_differ_between_jobs_and_not_within_one() -> None:
    backoffs = [Backoff() for _ in range(20)]
    waits = [one.wait_s for one in backoffs]
    assert waits == [one.wait_s for one in backoffs]
    assert len(set(waits)) > 1 and all(1 <= wait <= 1.25 for wait in waits)
    backoffs[0].count()
    assert 2 <= backoffs[0].wait_s <= 2.5


def test_restarts_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(restarting.time, "monotonic", lambda: now)
    ever, lately = History(2), History(2, window_s=60.0)
    for _ in range(2):
        assert ever.count_restart() == f"restart {ever.restarts} of 2"
        lately.count_restart()
        now += 40.0
    assert (ever.restarts_left, lately.restarts_left) == (0, 1)
    assert lately.count_restart() == "restart 2 of 2 within 60 s" and lately.restarts == 3
    now += 61.0
    assert (ever.restarts_left, lately.restarts_left) == (0, 2)


def test_the_same_failure_on_another_rank_and_elsewhere_in_memory() -> None:
    again = replace(
        FAILURE,
        rank=1,
        pid=2,
        time=9.0,
        message=FAILURE.message.replace("7f01", "7f99"),
        traceback=FAILURE.traceback.replace("7f01", "7f99"),
    )
    assert is_same_failure(FAILURE, again, lasted_s=3.0)


@pytest.mark.parametrize(
    ("changes", "lasted_s"),
    [
        ({}, 61.0),
        ({"steps": 1}, 3.0),
        ({"message": "other"}, 3.0),
        ({"traceback": FAILURE.traceback.replace("line 3", "line 4")}, 3.0),
        ({"traceback": ""}, 3.0),
        ({"exit_code": 2}, 3.0),
        ({"exit_code": 75}, 3.0),
        ({"kinds": ("builtins.ConnectionRefusedError", "builtins.OSError")}, 3.0),
        ({"kinds": ("tensorflow.python.framework.errors_impl.OpError",)}, 3.0),
        ({"kinds": ("tfdistkit.errors.RendezvousError",)}, 3.0),
    ],
)
def test_what_may_go_well_another_time(changes: dict[str, object], lasted_s: float) -> None:
    now = replace(FAILURE, **changes)
    assert not is_same_failure(FAILURE, now, lasted_s)
    if "kinds" in changes or "exit_code" in changes:
        assert is_same_failure(now, now, lasted_s) == (changes.get("exit_code") == 2)
    assert not is_same_failure(None, now, lasted_s) and not is_same_failure(FAILURE, None, lasted_s)


def test_failures_after_the_same_step_are_given_up_the_third_time() -> None:
    def counts(*steps: int | None) -> list[bool]:
        repeats = Repeats()
        return [repeats.give_up(replace(FAILURE, steps=one), 3000.0) for one in steps]

    assert counts(7, 7, 7) == [False, False, True]
    assert counts(7, 9, 9, 11, 11, 11) == [False] * 5 + [True], "a backup that lets training go on"
    assert counts(7, 7, None, 7, 7) == [False] * 5
    repeats = Repeats()
    found = [repeats.give_up(one, 3.0) for one in (FAILURE, None, FAILURE, replace(FAILURE, steps=0))]
    assert found == [False, False, False, True]


def test_a_pause_ends_when_it_is_over() -> None:
    asked = []
    pause(600.0, lambda: len(asked) > 2 or asked.append(time.monotonic()))  # type: ignore[arg-type,func-returns-value]
    pause(0.01, lambda: False)
