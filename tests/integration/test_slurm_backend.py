"""`tfdistkit run --backend slurm` on a real SLURM: submitted, followed, cancelled, started again."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, wait_until
from slurm_jobs import Run, started

# What users may call things, and no shell or sbatch may take for its own.
NASTY = 'it\'s a "test" #1 $HOME `id` \\ %j ; rm -rf *'

# Waits, until all ranks are there, before it goes on.
TOGETHER = """
    import os, pathlib, signal, sys, time
    from tfdistkit.cluster import detect_cluster
    spec = detect_cluster()
    there = pathlib.Path("there." + os.environ["TFDISTKIT_ATTEMPT"])
    def meet():
        there.mkdir(exist_ok=True)
        (there / str(spec.rank)).touch()
        while len(list(there.iterdir())) < spec.world_size:
            time.sleep(0.02)
"""


# Ends when it is told to, one rank by an exit code, one by the signal, as with BackupAndResume; and then it is done.
BACK_UP = (
    TOGETHER
    + """
    if os.path.exists("backup"):
        print("goes on", os.environ["SLURM_RESTART_COUNT"])
        sys.exit()
    def back_up(number, frame):
        pathlib.Path("backup").touch()
        time.sleep(0.5 * spec.rank)
        if spec.rank == 0:
            sys.exit(75)
        # As BackupAndResume, which ends by the signal and leaves a mark.
        pathlib.Path(os.environ["TFDISTKIT_TASK_DIR"], "backup").touch()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    signal.signal(signal.SIGUSR1, back_up)
    meet()
    time.sleep(600)
"""
)


@pytest.fixture(scope="module", autouse=True)
def backup_job(slurm: SlurmCluster, interrupted_job: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A job that SLURM itself sends SIGUSR1, 20 to 50 s after its start: it runs while the other tests do."""
    options = ["--nnodes", "2", "-np", "2", "--time", "2", "--backup-before", "70"]
    with started(slurm, tmp_path_factory.mktemp("backup"), BACK_UP, *options, nodes="n3,n10") as run:
        assert run.number
        yield run


def run_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith("tfdistkit-")]


def test_a_job_from_submission_to_end(slurm: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / NASTY.replace("/", "")
    folder.mkdir()
    script = (
        TOGETHER
        + """
    meet()
    told = [os.uname().nodename, spec.rank, spec.world_size, spec.local_rank, sys.argv[1:], os.environ["NASTY"],
            os.getcwd(), "TF_CONFIG" in os.environ, os.environ["SLURM_JOB_NAME"]]
    os.write(1, (repr(told) + chr(10)).encode())
    os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR" + bytes([10]))
    """
    )
    # What this shell holds of other clusters must not count.
    shell = {"TF_CONFIG": "nonsense", "HOROVOD_RANK": "7", "TFDISTKIT_RANK": "5"}
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--env", f"NASTY={NASTY}", "--time", "5"]
    options += ["--sbatch-arg=--comment=" + NASTY, f"--sbatch-arg=--job-name={NASTY}"]
    with started(slurm, folder, script, *options, arguments=(NASTY, "--", "-n"), **shell) as run:
        assert run.end() == 0, run.told
        job = slurm.ask("scontrol", "show", "job", run.number)
    lines = dict(re.findall(r"^(\d): (.*)$", run.told, re.MULTILINE))
    assert lines == {
        str(rank): repr([f"n{1 + rank // 2}", rank, 4, rank % 2, [NASTY, "--", "-n"], NASTY, str(folder), False, NASTY])
        for rank in range(4)
    }
    assert "absl::InitializeLog" not in run.told, "what TensorFlow logs at each start is in the log alone"
    assert f"Comment={NASTY}" in job and "TimeLimit=00:05:00" in job
    assert f"job {run.number}: COMPLETED" in run.told
    assert run_folders(folder) == [], "what ended well leaves nothing"


FAULTS = {
    "raise": ("raise ValueError('the cause')", 1, "rank 1 raised ValueError (host n2, pid"),
    "exit": ("sys.exit(7)", 7, "rank 1 ended with exit code 7 (host n2, pid"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL (host n2, pid"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_failure_is_reported(slurm: SlurmCluster, tmp_path: Path, fault: str) -> None:
    line, code, words = FAULTS[fault]
    script = (
        TOGETHER
        + f"""
    meet()
    if spec.rank == 1:
        {line}
    time.sleep(600)
    """
    )
    with started(slurm, tmp_path, script, "--nnodes", "2", "-np", "2", "--log-dir", "logs") as run:
        assert run.end() == code, run.told
        assert words in run.told
        assert "Stopped because of it: rank 0." in run.told
        assert f"All logs and events: {tmp_path / 'logs'}" in run.told
        assert slurm.job(run.number)["JobState"] == "FAILED"
    assert {path.name for path in (tmp_path / "logs").iterdir()} >= {"batch.sh", "events.jsonl", "log", "rank.0"}
    if fault == "raise":
        assert "    ValueError: the cause" in run.told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_job(slurm: SlurmCluster, tmp_path: Path, number: int) -> None:
    script = TOGETHER + "    meet(); print('all there'); time.sleep(600)"
    with started(slurm, tmp_path, script, "--nnodes", "2", "-np", "2", "--max-restarts", "3") as run:
        run.wait_for("0: all there")
        run.process.send_signal(number)
        assert run.end() == 128 + number, run.told
        assert slurm.job(run.number)["JobState"] == "CANCELLED"
        assert f"was ended by {signal.Signals(number).name}" in run.told and "attempt 1" not in run.told


def test_a_rank_that_ignores_the_end_is_killed(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = (
        TOGETHER
        + """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    meet(); print('all there'); os.kill(os.getpid(), signal.SIGSTOP) if spec.rank else time.sleep(600)
    """
    )
    with started(slurm, tmp_path, script, "--nnodes", "2", "-np", "2") as run:
        run.wait_for("0: all there")
        slurm.ask("scancel", run.number)  # somebody else does
        assert run.end() == 143, run.told
        assert f"job {run.number} failed after " in run.told
        assert ", SLURM says CANCELLED, with exit code 143." in run.told


def test_a_job_starts_again_after_a_failure(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = (
        TOGETHER
        + """
    meet()
    if spec.rank == 1 and os.environ["TFDISTKIT_ATTEMPT"] != "2":
        sys.exit(9)
    if os.environ["TFDISTKIT_ATTEMPT"] != "2":
        time.sleep(600)
    print("attempt", os.environ["TFDISTKIT_ATTEMPT"])
    """
    )
    with started(slurm, tmp_path, script, "-np", "2", "--max-restarts", "2", "--log-dir", "logs") as run:
        assert run.end() == 0, run.told
    assert re.findall(r"^(\d: .*)$", run.told, re.MULTILINE).count("1: attempt 2") == 1
    assert (tmp_path / "logs" / "attempt.1" / "rank.1" / "ended").read_text().startswith("9 ")
    # In the same folder, another job's failure is not taken for that of the last attempt before it.
    with started(slurm, tmp_path, "raise SystemExit(7)", "-np", "2", "--log-dir", "logs") as run:
        assert run.end() == 7, run.told
    assert "ended with exit code 7 (host n" in run.told and "exit code 9" not in run.told


def test_parameter_servers(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = """
    import pathlib, time
    from tfdistkit.cluster import detect_cluster
    task = detect_cluster().task
    print(f"{task.role} {task.index}")
    pathlib.Path(f"{task.role} {task.index} is there").touch()
    while len(list(pathlib.Path().glob("* is there"))) < 4:
        time.sleep(0.02)
    if task.role == "ps":
        raise SystemExit(5)
    time.sleep(600)
    """
    with started(slurm, tmp_path, script, "--nnodes", "2", "-np", "2", "--ps", "1") as run:
        assert run.end() == 5, run.told
    names = [line for line in re.findall(r"^(\d: .*)$", run.told, re.MULTILINE) if "slurmstepd" not in line]
    assert sorted(names) == ["0: chief 0", "1: worker 0", "2: worker 1", "3: ps 0"]
    assert "ps 0 ended with exit code 5" in run.told and "because of it: chief, worker 0, worker 1." in run.told


def test_a_signal_without_a_backup_ends_the_job_for_good(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = TOGETHER + "    meet(); print('all there'); time.sleep(600)"
    with started(slurm, tmp_path, script, "-np", "2", "--time", "5", "--backup-before", "60") as run:
        run.wait_for("0: all there")
        slurm.ask("scancel", "--signal=USR1", run.number)
        assert run.end() == 138, run.told
        assert slurm.job(run.number)["Restarts"] == "0"
    assert " was killed by SIGUSR1 (host n" in run.told
    assert "It was asked to make a backup, but had none yet, or makes none" in run.told


def test_submitted_and_left_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('here')")
    words = [sys.executable, "-m", "tfdistkit", "run", "--backend", "slurm", "-np", "1"]
    ended = slurm.run(*words, "--detach", "--log-dir", "logs", "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    wait_until(lambda: slurm.job(ended.stdout.strip())["JobState"] == "COMPLETED", "the end of the job")
    assert (tmp_path / "logs" / "log").read_text() == "here\n"
    # What SLURM does not take is told in its own words.
    ended = slurm.run(*words, "--partition", "no such", "train.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert "SLURM rejected the job." in ended.stderr and "invalid partition specified: no such" in ended.stderr
    # And what is printed is what it takes.
    ended = slurm.run(*words, "--dry-run", "--time", "0:05:00", "train.py", cwd=tmp_path)
    (tmp_path / "printed.sh").write_text(ended.stdout)
    tried = slurm.run("sbatch", "--test-only", "printed.sh", cwd=tmp_path)
    assert tried.returncode == 0 and "to start at" in tried.stderr
    assert run_folders(tmp_path) == []


def test_a_backup_before_the_time_limit_and_then_the_rest(slurm: SlurmCluster, backup_job: Run) -> None:
    assert backup_job.end() == 0, backup_job.told
    assert slurm.job(backup_job.number)["Restarts"] == "1"
    assert "there is a backup, and more to do" in backup_job.told
    assert "0: goes on 1" in backup_job.told and "1: goes on 1" in backup_job.told
