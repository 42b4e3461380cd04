"""`tfdistkit.launch` with real workers: results in rank order, the first failure raised, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_process import wait_until

import tfdistkit
from tfdistkit.errors import OptionError, WorkerFailedError
from tfdistkit.launcher.local.watchdog import marked_processes
from tfdistkit.report import Failure

MARK = "TEST_LAUNCH_MARK"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process of a test carries its mark; afterwards there is none."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    assert marked_processes(f"{MARK}={tmp_path}") == []


def who(*words: str, end: str = "") -> tuple:
    return (tfdistkit.rank(), tfdistkit.world_size(), os.getpid(), *words, end)


def test_results_in_rank_order(tmp_path: Path) -> None:
    results = tfdistkit.launch(who, ("a", "b"), np=2, kwargs={"end": "z"})
    assert [(rank, size, *rest) for rank, size, _, *rest in results] == [(0, 2, "a", "b", "z"), (1, 2, "a", "b", "z")]
    assert len({pid for _, _, pid, *_ in results} | {os.getpid()}) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_single_worker() -> None:
    assert tfdistkit.launch(lambda: tfdistkit.world_size(), np=1) == [1]


def test_closures_local_classes_and_large_results() -> None:
    class Point:
        def __init__(self, x: int):
            self.x = x

    base = 40
    results = tfdistkit.launch(lambda more: (Point(base + more + tfdistkit.rank()), b"x" * 5_000_000), (2,))
    assert [point.x for point, _ in results] == [42, 43]
    assert all(type(point) is Point and len(data) == 5_000_000 for point, data in results)


def test_variables_and_threads() -> None:
    def look() -> list[str | None]:
        return [os.environ.get(name) for name in ("COLOUR", "OMP_NUM_THREADS")]

    assert tfdistkit.launch(look, env={"COLOUR": "blue"}, threads_per_worker=3) == [["blue", "3"]] * 2


def test_output_is_shown_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tfdistkit.launch(lambda: print("grüße from", tfdistkit.rank()), log_dir=tmp_path / "logs")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] grüße from 0", "[1] grüße from 1"]
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "grüße from 1\n"


def test_the_first_failure_is_raised() -> None:
    def train() -> None:
        if tfdistkit.rank() == 1:
            raise KeyError("lost")
        time.sleep(600)

    with pytest.raises(WorkerFailedError) as caught:
        tfdistkit.launch(train)
    message = str(caught.value)
    assert message.startswith("rank 1 raised KeyError") and 'raise KeyError("lost")' in message
    assert "KeyError: 'lost'" in message and "Stopped because of it: rank 0." in message
    assert isinstance(caught.value.failure, Failure)
    assert (caught.value.failure.rank, caught.value.failure.error_type) == (1, "KeyError")


def test_a_killed_worker_is_raised() -> None:
    def train() -> None:
        if tfdistkit.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(WorkerFailedError, match="rank 0 was killed by SIGKILL"):
        tfdistkit.launch(train)


def test_the_timeout() -> None:
    with pytest.raises(WorkerFailedError, match="did not end within 1 seconds"):
        tfdistkit.launch(time.sleep, (600,), timeout_s=1)


def test_a_function_that_ends_its_process_has_no_result() -> None:
    with pytest.raises(WorkerFailedError, match="Rank 0 succeeded, but its result cannot be read"):
        tfdistkit.launch(lambda: os._exit(0))


def test_a_result_that_cannot_be_sent_back() -> None:
    import threading

    with pytest.raises(WorkerFailedError, match="must be an object that cloudpickle can pickle. Received: lock"):
        tfdistkit.launch(threading.Lock)


def test_a_function_that_cannot_be_sent(tmp_path: Path) -> None:
    import threading

    with pytest.raises(OptionError, match="`fn` and its arguments must be objects that cloudpickle can pickle"):
        tfdistkit.launch(print, (threading.Lock(),))
    assert list(tmp_path.iterdir()) == []


def rate(learning_rate: float, epochs: int = 1) -> float:
    return learning_rate * epochs


@pytest.mark.parametrize(
    ("words", "named", "told"),
    [
        ((rate, 2), {}, "Received: args=2. Expected: a tuple such as (0.1,); the number of workers is `np`."),
        ((rate, 2), {}, "For 2 workers: tfdistkit.launch(rate, np=2)\nFor the argument 2: tfdistkit.launch(rate, (2,)"),
        ((rate, 0.1), {}, "Put a single argument into a tuple: tfdistkit.launch(rate, (0.1,))"),
        ((rate, "abc"), {}, "Put a single argument into a tuple: tfdistkit.launch(rate, ('abc',))"),
        ((rate, {"epochs": 3}), {}, "Pass keyword arguments as `kwargs`: tfdistkit.launch(rate, kwargs={'epochs': 3})"),
        ((rate, None), {}, "`args` must be a tuple or a list of the function's arguments. Received: args=None."),
        ((rate,), {}, "`rate` cannot be called with these arguments: missing a required argument: 'learning_rate'."),
        ((rate, (1, 2, 3)), {}, "too many positional arguments. Received: args=(1, 2, 3), kwargs={}."),
        ((rate, (1,)), {"kwargs": {"epoch": 2}}, "Expected: arguments for rate(learning_rate"),
        (
            (rate, (1,)),
            {"kwargs": [2]},
            "`kwargs` must be a dict of keyword arguments, such as {'epochs': 3}. Received: kwargs=[2]",
        ),
        ((rate(1), 2), {}, "`fn` must be a function. Received: fn=1.\nGive the function"),
        (("train.py",), {}, "For a script, type: tfdistkit run -np 2 train.py"),
        ((rate, (1,)), {"np": "2:3"}, "`np` must be one number: `tfdistkit.launch` starts a fixed number of workers"),
        ((rate, (1,)), {"np": (2, 3)}, "Received: np=(2, 3).\nWrite the function into a script, and start it with"),
    ],
)
def test_an_invalid_call_names_the_fix(tmp_path: Path, words: tuple, named: dict, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        tfdistkit.launch(*words, **named)
    assert told in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_function_that_does_not_tell_its_arguments_is_called(tmp_path: Path) -> None:
    assert tfdistkit.launch(max, ([1, 3], [2]), np=1) == [[2]]


@pytest.mark.parametrize("wrong", [{"np": 0}, {"timeout_s": -1}, {"env": {"A": 1}}, {"fn": "train"}])
def test_wrong_arguments(wrong: dict) -> None:
    with pytest.raises(OptionError):
        tfdistkit.launch(**{"fn": print, **wrong})


def test_an_earlier_result_is_not_taken_for_this_one(tmp_path: Path) -> None:
    assert tfdistkit.launch(lambda: 1, log_dir=tmp_path / "logs") == [1, 1]
    with pytest.raises(WorkerFailedError, match="cannot be read"):
        tfdistkit.launch(lambda: os._exit(0), log_dir=tmp_path / "logs")


def test_functions_of_main_and_ctrl_c(tmp_path: Path) -> None:
    """As in a notebook: the function is `__main__`'s, and Ctrl-C leaves nothing behind."""
    (tmp_path / "notebook.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, subprocess, time
            import tfdistkit
            SCALE = 10
            class Box:
                def __init__(self, x): self.x = x
            def work(x):
                return Box(SCALE * x + tfdistkit.rank())
            def hang():
                subprocess.Popen(["sleep", "600"])
                pathlib.Path(f"up.{tfdistkit.rank()}").touch()
                time.sleep(600)
            results = tfdistkit.launch(work, (2,))
            print([box.x for box in results], all(type(box) is Box for box in results), flush=True)
            try:
                tfdistkit.launch(hang)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, "notebook.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: (tmp_path / "up.0").exists() and (tmp_path / "up.1").exists(), "the workers")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0].splitlines() == ["[20, 21] True", "interrupted"]
    finally:
        process.kill()
        process.wait()
