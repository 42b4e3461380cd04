"""Only the user can read the files of a job, and no other user can redirect its writes."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import job, run_job, write_script

from tfdistkit.report.events import read_events


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_only_the_user_can_read_the_logs(tmp_path: Path, umask: int) -> None:
    script = write_script(tmp_path, "raise ValueError('password')")
    command = [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--log-dir", "new/logs", script]
    ended = subprocess.run(command, cwd=tmp_path, umask=umask, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1, ended.stderr
    logs = tmp_path / "new/logs"
    for folder in (tmp_path / "new", logs, logs / "rank.0", logs / "rank.1"):
        assert mode(folder) == 0o700, folder
    for file in (logs / "events.jsonl", logs / "rank.0/stdout", logs / "rank.1/stderr"):
        assert mode(file) == 0o600, file


def test_only_the_user_can_read_the_arguments_of_a_function(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import tfdistkit
        print(tfdistkit.launch(lambda word: len(word), args=("secret",), np=2, log_dir="logs"))
        """,
    )
    command = [sys.executable, script]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.endswith("[6, 6]\n")
    assert mode(tmp_path / "logs") == 0o700 and mode(tmp_path / "logs/call.pkl") == 0o600


def test_a_folder_in_use_by_another_job_is_rejected(tmp_path: Path) -> None:
    waits = write_script(tmp_path, "import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)")
    with job("-np", "2", "--log-dir", "logs", waits, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "up")
        before = (tmp_path / "logs/events.jsonl").read_text()
        command = [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--log-dir", "logs", waits]
        second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 2
        assert "The folder for logs must not belong to a running job." in second.stderr
        assert (tmp_path / "logs/events.jsonl").read_text() == before
    # It was killed, and the folder is free.
    assert run_job("-np", "2", "--log-dir", "logs", write_script(tmp_path, ""), cwd=tmp_path).code == 0
    assert read_events(tmp_path / "logs")[-1]["outcome"] == "succeeded"


@pytest.mark.parametrize("link", ["logs/rank.0", "logs/rank.0/stdout", "logs/events.jsonl"])
def test_symbolic_links_are_not_followed(tmp_path: Path, link: str) -> None:
    """In a folder that others can write to they lead anywhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    path = tmp_path / link
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere if link.endswith("rank.0") else elsewhere / "file")
    ended = run_job("-np", "2", "--log-dir", "logs", write_script(tmp_path, "print('words')"), cwd=tmp_path)
    assert [one.name for one in elsewhere.iterdir()] == ["file"] and (elsewhere / "file").read_text() == "precious"
    if link.endswith("stdout"):
        assert "logs/rank.0/stdout could not be created: " in ended.stderr and ended.code == 0
    else:
        assert ended.code == 2 and "The folder for the logs cannot be used." in ended.stderr


@pytest.mark.parametrize("words", [["--dry-run"], ["-v"], ["--backend", "slurm", "--dry-run"]])
def test_secrets_are_not_shown(tmp_path: Path, words: list[str]) -> None:
    script = write_script(tmp_path, "import os; assert os.environ['WANDB_API_KEY'] == 'abc123'")
    variables = ["--env", "WANDB_API_KEY=abc123", "--env", "SEED=77"]
    ended = run_job("-np", "2", *words, "--log-dir", "logs", *variables, script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    shown = ended.stdout + ended.stderr
    assert "abc123" not in shown and "WANDB_API_KEY='(hidden)'" in shown and "SEED=77" in shown
    events = tmp_path / "logs/events.jsonl"
    assert not events.exists() or "abc123" not in events.read_text()


def test_passwords_in_urls_are_not_shown(tmp_path: Path) -> None:
    variables = ["--env", "STORE=postgres://me:abc123@db/runs", "--env", "SITE=https://host:8080/a@b"]
    ended = run_job("-np", "1", "--dry-run", *variables, write_script(tmp_path, ""), cwd=tmp_path)
    assert "abc123" not in ended.stdout and "STORE='(hidden)'" in ended.stdout
    assert "SITE=https://host:8080/a@b" in ended.stdout


@pytest.mark.parametrize("words", [["--dry-run"], ["-v"], ["--backend", "slurm", "--dry-run"]])
def test_secrets_among_the_arguments_are_not_shown(tmp_path: Path, words: list[str]) -> None:
    given = ["--api-key", "abc123", "--hf-token=abc123", "mysql://me:abc123@db/x", "--tokenizer", "bert", "--author=me"]
    script = write_script(tmp_path, f"import sys; assert sys.argv[1:] == {given}")
    ended = run_job("-np", "2", *words, "--log-dir", "logs", script, *given, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    shown = ended.stdout + ended.stderr
    assert "--api-key '(hidden)' '--hf-token=(hidden)' '(hidden)' --tokenizer bert --author=me" in shown
    events = tmp_path / "logs/events.jsonl"
    assert "abc123" not in shown + (events.read_text() if events.exists() else "")
    assert events.exists() is (words == ["-v"])


def test_rejected_variables_are_named_without_their_values(tmp_path: Path) -> None:
    words = ["--env", "TFDISTKIT_JOB_ID=abc123", write_script(tmp_path, "")]
    ended = run_job("-np", "1", *words, cwd=tmp_path)
    assert ended.code == 2 and "TFDISTKIT_JOB_ID=..." in ended.stderr and "abc123" not in ended.stderr


def test_a_passed_variable_is_shown_by_its_name(tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    ended = run_job("-np", "1", "--dry-run", "--env", "DATA=/data/set", script, cwd=tmp_path, DATA="/data/set")
    assert 'DATA="$DATA"' in ended.stdout and "/data/set" not in ended.stdout


def test_each_job_has_its_own_secret(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os; print('it is', os.environ['TFDISTKIT_SECRET'])")
    secrets = []
    for number in range(2):
        ended = run_job("-np", "2", "-v", "--log-dir", f"logs{number}", script, cwd=tmp_path)
        assert ended.code == 0, ended.stderr
        printed = {line.partition("it is ")[2] for line in ended.stdout.splitlines()}
        assert len(printed) == 1, "the ranks of a job share it"
        secrets += printed
        assert secrets[-1] not in ended.stderr + (tmp_path / f"logs{number}/events.jsonl").read_text()
    assert len(set(secrets)) == 2 and min(map(len, secrets)) == 64
