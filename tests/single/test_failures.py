"""Crash records, the first cause among failures, and the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tfdistkit.errors import RendezvousError
from tfdistkit.report import (
    CrashRecord,
    EventLog,
    Failure,
    ProcessName,
    describe_failure,
    describe_run,
    first_cause_first,
    read_crash,
    read_events,
    write_crash,
)
from tfdistkit.report.crashes import kinds_of
from tfdistkit.report.failures import signal_name

RECORD = CrashRecord(1, "node7", 4711, 123.5, 1, "ValueError", "ü\n", "Traceback ...\n")
KILLED = Failure(1, "node7", 4711, 137, time=10.0, signal="SIGKILL")
RAISED = Failure(0, "node7", 4710, 1, time=10.0, error_type="ValueError", message="no", traceback="T\nValueError: no\n")
ALL = [ProcessName(rank) for rank in range(100)]
ABORTED = replace(
    RAISED,
    error_type="UnavailableError",
    message="Collective ops is aborted by: Connection reset by peer",
    kinds=("tensorflow.python.framework.errors_impl.OpError",),
)


def test_a_crash_record_round_trip(tmp_path: Path) -> None:
    write_crash(tmp_path, RECORD)
    assert read_crash(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"rank": 1}', '{"unknown": 1}', "3"])
def test_an_invalid_crash_record_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "error.json").write_text(text)
    assert read_crash(tmp_path) is None


@pytest.mark.parametrize(
    ("failures", "ranks"),
    [
        ([RAISED, replace(KILLED, time=9.0)], [1, 0]),
        ([replace(RAISED, time=9.0), KILLED], [0, 1]),
        # A consequence is never the cause, even if it is earlier by the clock.
        ([replace(ABORTED, time=9.0), KILLED], [1, 0]),
        ([replace(ABORTED, time=9.0), replace(ABORTED, rank=2, time=8.0)], [2, 0]),
        ([replace(RAISED, rank=3), RAISED], [0, 3]),
        ([], []),
    ],
)
def test_the_first_cause_comes_first(failures: list[Failure], ranks: list[int]) -> None:
    assert [failure.rank for failure in first_cause_first(failures)] == ranks


def test_a_coordinators_error_on_a_lost_server_is_a_consequence() -> None:
    for message in ("Ps 0 has shown no sign of life for 20 seconds", "Ps 0 is gone, and the variables on it with it."):
        chief = replace(ABORTED, role="chief", message=message, time=1.0)
        assert first_cause_first([chief, replace(KILLED, role="ps")])[0].name == ProcessName(1, "ps")


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (ConnectionRefusedError(111, "Connection refused"), False),  # a database of the user's
        (BrokenPipeError(32, "Broken pipe"), False),
        (RuntimeError("Collective ops is aborted"), False),
        (RendezvousError("rank 1 did not come"), True),
    ],
)
def test_consequences_by_type(error: Exception, is_consequence: bool) -> None:
    failure = replace(RAISED, error_type=type(error).__name__, message=str(error), kinds=kinds_of(error))
    assert failure.is_consequence is is_consequence
    try:
        raise ValueError("no step") from error
    except ValueError as outer:
        assert replace(failure, kinds=kinds_of(outer)).is_consequence is is_consequence


@pytest.mark.tensorflow
def test_consequences_by_text_of_tensorflows_errors() -> None:
    import tensorflow as tf

    for text, is_consequence in (("Collective ops is aborted by: Socket closed", True), ("no such file", False)):
        error = tf.errors.UnavailableError(None, None, text)
        assert replace(RAISED, message=text, kinds=kinds_of(error)).is_consequence is is_consequence


def test_kinds_of_circular_causes() -> None:
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    assert {"builtins.ValueError", "builtins.KeyError"} <= set(kinds_of(one))


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (KILLED, "was killed by SIGKILL"),
        (RAISED, "raised ValueError"),
        (Failure(0, "h", 1, 3, 0.0, error_type="SystemExit"), "ended with exit code 3"),
        (Failure(0, "h", 1, 3, 0.0), "ended with exit code 3"),
    ],
)
def test_the_headline(failure: Failure, words: str) -> None:
    assert failure.headline == words


def test_a_failure_is_described_completely(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    told = describe_failure(replace(RAISED, log_path=log))
    assert told.splitlines()[0] == "rank 0 raised ValueError (host node7, pid 4710, exit code 1)"
    assert f"log: {log}" in told
    assert told.endswith("the end of its traceback:\n    T\n    ValueError: no")


def test_without_a_traceback_the_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    bar = b"1/9\b\b\b\r9/9\n"
    log.write_bytes(b"x" * 100_000 + b"\nline\n" * 5 + bar + b"\xff the end\n\n")
    lines = describe_failure(replace(KILLED, log_path=log)).splitlines()
    assert "the last lines of its log:" in lines
    assert lines[-2:] == ["    9/9", "    \ufffd the end"]
    assert max(map(len, lines)) < 500 and len(lines) < 24


def test_a_missing_log_is_no_error(tmp_path: Path) -> None:
    assert "killed by SIGKILL" in describe_failure(replace(KILLED, log_path=tmp_path / "none"))


def test_a_long_traceback_is_cut_at_its_start() -> None:
    traceback = "".join(f"line {i}\n" for i in range(500))
    lines = describe_failure(replace(RAISED, traceback=traceback)).splitlines()
    assert lines[-1] == "    line 499" and lines[-16] == "    ..." and len(lines) < 24


def test_a_run_is_described_on_one_screen(tmp_path: Path) -> None:
    others = [replace(ABORTED, rank=rank) for rank in range(2, 40)]
    told = describe_run([KILLED, *others], suspended=[ProcessName(5)], stopped=ALL, kept=tmp_path)
    assert told.splitlines()[0].startswith("rank 1 was killed by SIGKILL")
    assert "Later, rank 2 raised UnavailableError too." in told and "35 more failed too" in told
    assert "rank 5 had been suspended (SIGSTOP)" in told
    assert "Stopped because of it: ranks 0, 1, 2, 3, 4, 5, 6, 7, ...." in told
    assert len(told.splitlines()) < 24


def test_roles_have_names(tmp_path: Path) -> None:
    chief, worker, ps = (ProcessName(0, "chief"), ProcessName(3, "worker"), ProcessName(0, "ps"))
    killed = replace(KILLED, role="ps", rank=0, remark="It had been suspended.")
    earlier = replace(RAISED, role="worker", rank=3, time=9.0)
    told = describe_run([killed, earlier], suspended=[chief], stopped=[chief, worker], incidents=["worker 1 was gone."])
    lines = told.splitlines()
    assert lines[0] == "ps 0 was killed by SIGKILL (host node7, pid 4711, exit code 137)"
    assert lines[1] == "It had been suspended.", "what the launcher knows is better than a guess"
    assert lines[2] == "chief had been suspended (SIGSTOP), which blocked the other processes."
    assert lines[3] == "Before, worker 3 raised ValueError too."
    assert lines[4] == "Stopped because of it: chief, worker 3."
    assert lines[5] == "Earlier: worker 1 was gone."
    assert [name.folder for name in (chief, worker, ps, ProcessName(2))] == ["chief.0", "worker.3", "ps.0", "rank.2"]


def test_a_consequence_alone_is_described_as_one() -> None:
    assert "no worker had failed before it" in describe_run([ABORTED])
    assert "no worker had failed before it" not in describe_run([KILLED])


def test_signal_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(63).startswith("signal 63") or signal_name(63).startswith("SIG")


def test_an_event_round_trip(tmp_path: Path) -> None:
    with EventLog(tmp_path) as events:
        events.add("one", rank=1)
        events.add("two", text="ü\n")
        assert [event["event"] for event in read_events(tmp_path)] == ["one", "two"]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('what a worker printed\n7\n{"event": "three"}\n{"event": "cut o')
    assert [event["event"] for event in read_events(tmp_path)] == ["one", "two", "three"]
    with (tmp_path / "events.jsonl").open("r+") as file:
        file.truncate(len("".join(file.readlines()[:2])))
    assert [event["event"] for event in read_events(tmp_path)] == ["one", "two"]
    assert read_events(tmp_path)[1]["text"] == "ü\n" and read_events(tmp_path)[0]["rank"] == 1
