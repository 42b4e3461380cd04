"""Run folders of ended jobs are removed after a while; nothing else is, whoever made it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdistkit.cli.main import main
from tfdistkit.launcher.old_runs import remove_old_runs
from tfdistkit.report.events import EventLog

DAY_S = 86_400


def make_run(folder: Path, name: str = "tfdistkit-77-0123abcd", days: float = 8.0) -> Path:
    """A run folder as a job leaves it."""
    path = folder / name
    with EventLog(path) as events:
        events.add("job_started")
    (path / "rank.0").mkdir()
    (path / "rank.0" / "stdout").write_text("kept")
    moment = time.time() - days * DAY_S
    os.utime(path / "events.jsonl", (moment, moment))
    return path


def test_old_folders_of_ended_jobs_are_removed(tmp_path: Path) -> None:
    old = make_run(tmp_path)
    young = make_run(tmp_path, "tfdistkit-77-00000000", days=6.0)
    assert [run.path for run in remove_old_runs(tmp_path)] == [old]
    assert not old.exists() and (young / "rank.0/stdout").exists()
    assert [run.path for run in remove_old_runs(tmp_path, older_than_days=0.0)] == [young]


@pytest.mark.parametrize(
    "name", ["logs", "tfdistkit", "tfdistkit-mpi-0123abcd", "tfdistkit-77-0123abcd.old", "x-77-0123abcd"]
)
def test_other_names_stay(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path, name)
    assert remove_old_runs(tmp_path) == [] and path.exists()


def test_other_folders_are_kept(tmp_path: Path) -> None:
    cases = {number: tmp_path / f"tfdistkit-{number}-0123abcd" for number in range(1, 7)}
    outside = make_run(tmp_path, "outside")
    cases[1].symlink_to(outside)
    cases[2].write_text("a file")
    cases[3].mkdir()  # without an event log: a job may be about to start
    cases[4].mkdir()
    (cases[4] / "events.jsonl").symlink_to(outside / "events.jsonl")
    cases[5].mkdir()
    os.mkfifo(cases[5] / "events.jsonl")
    make_run(tmp_path, cases[6].name)
    (cases[6] / "batch.sh").touch()  # SLURM has not ended it
    assert remove_old_runs(tmp_path, older_than_days=0.0) == []
    assert all(os.path.lexists(path) for path in cases.values()) and (outside / "rank.0/stdout").exists()
    (cases[6] / "ended").touch()
    assert [run.path for run in remove_old_runs(tmp_path)] == [cases[6]]


def test_a_link_inside_is_not_followed(tmp_path: Path) -> None:
    outside = make_run(tmp_path, "outside")
    (make_run(tmp_path) / "rank.0" / "link").symlink_to(outside)
    assert len(remove_old_runs(tmp_path)) == 1 and (outside / "rank.0/stdout").exists()


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    with (path / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert remove_old_runs(tmp_path) == [] and path.exists()
    assert len(remove_old_runs(tmp_path)) == 1


def test_folders_of_other_users_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, user = make_run(tmp_path), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert remove_old_runs(tmp_path) == [] and theirs.exists()


def test_a_folder_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    assert remove_old_runs(tmp_path / "missing") == []


def test_the_command_shows_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, young = make_run(tmp_path), make_run(tmp_path, "tfdistkit-77-00000000", days=0.0)
    assert main(["clean", "--dry-run", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("2 run folders of ended jobs would be removed.\n") and old.exists()
    assert main(["clean", "--older-than", "1", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{old}  (ended 2") and told.endswith("\n1 run folder of ended jobs removed.\n")
    assert young.exists() and not old.exists()
    for words in (["--older-than", "-1"], [str(tmp_path / "missing")]):
        with pytest.raises(SystemExit, match="2"):
            main(["clean", *words])


def test_a_job_removes_run_folders_that_are_a_week_old(tmp_path: Path) -> None:
    old, young = make_run(tmp_path), make_run(tmp_path, "tfdistkit-77-00000000", days=1.0)
    (tmp_path / "script.py").write_text("")
    for words, is_there in ((["--log-dir", "logs"], True), ([], False)):
        command = [sys.executable, "-m", "tfdistkit", "run", "-np", "1", *words, "script.py"]
        variables = {**os.environ, "TMPDIR": str(tmp_path)}
        subprocess.run(command, cwd=tmp_path, env=variables, timeout=60, check=True, stdin=subprocess.DEVNULL)
        assert old.exists() == is_there and young.exists()
