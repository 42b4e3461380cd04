"""The result of a SLURM job: which task failed first, and which deaths SLURM caused itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.output.sinks import NowhereSink
from tfdistkit.launcher.slurm.batch_script import BatchJob, SlurmOptions
from tfdistkit.launcher.slurm.commands import JobState
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.supervise import batch_job
from tfdistkit.supervise.result import JobResult


def result_of(monkeypatch: pytest.MonkeyPatch, folder: Path, state: JobState, codes: dict[int, str]) -> JobResult:
    """Returns the result of a job of two tasks that recorded `codes`; SLURM's commands are not called."""
    monkeypatch.setattr(batch_job.slurm, "look_at_job", lambda number: state)
    job = BatchJob(JobSpec(2, ("train.py",), folder, backend="slurm"), SlurmOptions(), folder, "python3")
    (folder / "log").write_bytes(b"")
    for rank in (0, 1):
        (folder / f"rank.{rank}").mkdir()
        (folder / f"rank.{rank}" / "pid").write_text("17\n")
        if rank in codes:
            (folder / f"rank.{rank}" / "ended").write_text(f"{codes[rank]} {time.time() + rank} n{rank}\n")
    console = Console(NowhereSink(), NowhereSink(), ["job"])
    return batch_job.follow_batch_job("1", job, console, [])[0]


@pytest.mark.parametrize("code", ["143", "137"])
@pytest.mark.parametrize("state, expected", [("NODE_FAIL", 1), ("PREEMPTED", 1), ("CANCELLED", 143)])
def test_tasks_that_slurm_ended_are_not_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, expected: int, code: str
) -> None:
    """A task may record its exit before its shell receives SIGTERM, too."""
    result = result_of(monkeypatch, tmp_path, JobState(state), {0: code})
    assert (result.exit_code, result.failures) == (expected, ())
    assert [str(name) for name in result.stopped] == ["rank 0", "rank 1"]


def test_a_task_that_failed_before_slurm_ended_the_job_is_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = result_of(monkeypatch, tmp_path, JobState("NODE_FAIL"), {0: "143", 1: "3"})
    assert (result.exit_code, [failure.rank for failure in result.failures]) == (3, [1])


def test_a_killed_task_is_the_cause_of_a_failed_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = result_of(monkeypatch, tmp_path, JobState("FAILED", exit_code=137), {0: "137", 1: "143"})
    assert (result.exit_code, [failure.rank for failure in result.failures]) == (137, [0])
