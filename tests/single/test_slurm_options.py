"""`tfdistkit run --backend slurm`: options, errors, and the states of a job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from slurm_steps import SALLOC, put

from tfdistkit.cli.main import main
from tfdistkit.cli.run import command
from tfdistkit.cli.run.options import parse
from tfdistkit.cli.run.slurm import inherited_variables
from tfdistkit.launcher.slurm.batch_script import BatchJob, batch_script
from tfdistkit.launcher.slurm.commands import JobState, parse_job


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def spec(*words: str) -> BatchJob:
    options = parse(["--backend", "slurm", *words, "train.py", "--epochs", "3"])
    assert options.slurm is not None
    return BatchJob(command.job_of(options, None), options.slurm, folder=Path("/here"), python="python3")


def directives(*words: str) -> list[str]:
    return re.findall("^#SBATCH (.*)$", batch_script(spec("--log-dir", "/logs", *words)), re.MULTILINE)


def test_the_options_of_the_issue() -> None:
    told = directives("--nnodes", "2", "--nproc-per-node", "4", "--time", "1:00:00", "--partition", "gpu")
    assert told == [
        "--job-name=train",
        "--chdir=/here",
        "--output=/logs/log",
        "--open-mode=append",
        "--ntasks=8",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--partition=gpu",
        "--time=1:00:00",
        "--no-requeue",
    ]


@pytest.mark.parametrize(
    ("words", "tasks", "nodes", "per_node"),
    [
        (("-np", "5"), 5, None, None),
        (("-np", "5", "--nnodes", "2"), 5, 2, None),
        (("--nproc-per-node", "3"), 3, 1, 3),
        (("-np", "6", "--nnodes", "2", "--nproc-per-node", "3"), 6, 2, 3),
        # Plus a coordinator and two servers; SLURM chooses their nodes.
        (("--nnodes", "2", "--nproc-per-node", "3", "--ps", "2"), 9, 2, None),
    ],
)
def test_how_many_tasks_on_how_many_nodes(words: tuple[str, ...], tasks: int, nodes: object, per_node: object) -> None:
    job = spec(*words)
    wanted = {"ntasks": tasks, "nodes": nodes, "ntasks-per-node": per_node}
    placed = re.findall("^#SBATCH --(n.*)=(.*)$", batch_script(job), re.MULTILINE)
    assert dict(placed) == {name: str(number) for name, number in wanted.items() if number is not None}
    assert job.command == ("python3", "-m", "tfdistkit.worker", "train.py", "--epochs", "3")
    assert f'srun --kill-on-bad-exit=1 --label sh -c "$task" tfdistkit {" ".join(job.command)}\n' in batch_script(job)


def test_a_range_of_nodes() -> None:
    job = spec("--nnodes", "2:4", "--nproc-per-node", "3")
    script = batch_script(job)
    placed = re.findall("^#SBATCH --([nm].*)=(.*)$", script, re.MULTILINE)
    # A number of tasks would be a limit for the number of nodes.
    assert dict(placed) == {"nodes": "2-4", "mincpus": "3"}
    assert re.findall("^#SBATCH (--.*requeue)$", script, re.MULTILINE) == ["--requeue"]
    assert '--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$(($SLURM_JOB_NUM_NODES * 3))" --ntasks-per-node=3 sh' in script
    assert "export TFDISTKIT_ELASTIC=6:12\n" in script and job.tasks == 12
    for word in ("--cpus-per-task=4", "-c4"):
        assert "--mincpus=12" in directives("--nnodes", "2:4", "--nproc-per-node", "3", f"--sbatch-arg={word}")


def test_names_of_tasks() -> None:
    assert [str(spec("-np", "2").process_name(task)) for task in range(2)] == ["rank 0", "rank 1"]
    job = spec("-np", "2", "--ps", "2")
    assert [str(job.process_name(task)) for task in range(5)] == ["chief", "worker 0", "worker 1", "ps 0", "ps 1"]


def test_a_backup_before_the_end() -> None:
    assert directives("-np", "2", "--backup-before", "90")[-2:] == ["--signal=USR1@90", "--requeue"]
    assert directives("-np", "2")[-1] == "--no-requeue" and "--signal" not in str(directives("-np", "2"))


def test_threads_and_variables() -> None:
    variables = spec("-np", "2", "--threads-per-worker", "3", "--env", "OMP_NUM_THREADS=1", "--env", "A=b c").env
    assert variables == {
        "TF_NUM_INTRAOP_THREADS": "3",
        "TF_NUM_INTEROP_THREADS": "3",
        "OMP_NUM_THREADS": "1",
        "A": "b c",
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--backend", "slurm"), "-np, the number of workers, is missing"),
        (("--time", "1:00", "-np", "2"), "--time is for SLURM: add --backend slurm."),
        (("--backend", "slurm", "-np", "0"), "-np must be >= 1. Received: 0."),
        (("--backend", "slurm", "-np", "2", "--nnodes", "0"), "--nnodes must be >= 1. Received: 0."),
        (("--backend", "slurm", "-np", "2", "--ps", "-1"), "--ps must be >= 0. Received: -1."),
        (("--backend", "slurm", "-np", "3", "--nnodes", "2", "--nproc-per-node", "2"), "-np must be 2 * 2"),
        (("--backend", "slurm", "-np", "2", "--sbatch-arg=gres"), "it must be an option, such as"),
        (("--backend", "slurm", "-np", "2", "--sbatch-arg=--mem 4G"), "Write --sbatch-arg=--mem=4G"),
        (("--backend", "slurm", "-np", "2", "--sbatch-arg=--array=1-3"), "the launcher sets --array itself."),
        (("--backend", "slurm", "-np", "2", "--sbatch-arg=-ofile"), "the launcher sets -o itself."),
        (("--backend", "slurm", "-np", "2", "--timeout", "60"), "Use --time"),
        (
            ("--backend", "slurm", "-np", "2", "--env", "a-b=c"),
            "the name in --env must consist of letters, digits and _. Received: a-b",
        ),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    with pytest.raises(SystemExit) as leave:
        parse([*words, "train.py"])
    assert leave.value.code == 2
    assert told in capsys.readouterr().err


def test_inherited_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, {"SLURM_CONF": "/slurm.conf", "SLURM_MPI_TYPE": "pmix", "TF_CONFIG": "{}", "OTHER": "1"})
    inherited = inherited_variables()
    assert (inherited["SLURM_CONF"], inherited["SLURM_MPI_TYPE"], inherited["OTHER"]) == ("/slurm.conf", "pmix", "1")
    assert "TF_CONFIG" not in inherited
    # srun would take variables of the enclosing job for options.
    put(monkeypatch, SALLOC, {"SLURM_DISTRIBUTION": "cyclic"})
    assert [name for name in inherited_variables() if name.startswith("SLURM")] == ["SLURM_CONF"]


def test_options_for_sbatch_must_be_printable(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["run", "--backend", "slurm", "-np", "2", "--sbatch-arg=--comment=two\nlines", "--dry-run", "train.py"])
    assert code == 2
    assert "An option for sbatch must be one line of printable text." in capsys.readouterr().err


def test_without_slurm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["run", "--backend", "slurm", "-np", "2", "train.py"]) == 2
    assert "`sbatch` was not found." in capsys.readouterr().err
    assert list(Path().iterdir()) == [Path("train.py")]


@pytest.mark.parametrize(
    ("text", "state", "has_ended"),
    [
        ("JobId=7 JobName=a JobState=PENDING Reason=Resources ExitCode=0:0 NodeList=", "PENDING (Resources)", False),
        ("JobId=7 JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n[1-2] Power=", "RUNNING on n[1-2]", False),
        ("JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0 NodeList=n1", "COMPLETED", True),
        ("JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0 NodeList=n1", "FAILED (NonZeroExitCode)", True),
        # The user's own options come last.
        ("JobId=7 JobState=RUNNING Reason=None NodeList=n1 Comment=x JobState=FAILED", "RUNNING on n1", False),
        ("JobId=7 JobState=REQUEUE_HOLD Reason=None NodeList=(null)", "REQUEUE_HOLD", False),
    ],
)
def test_answers_of_slurm(text: str, state: str, has_ended: bool) -> None:
    found = parse_job(text)
    assert found is not None
    assert (str(found), found.has_ended) == (state, has_ended)


def test_how_a_job_ended() -> None:
    assert parse_job("JobState=FAILED ExitCode=7:0") == JobState("FAILED", exit_code=7)
    assert parse_job("JobState=CANCELLED ExitCode=0:15") == JobState("CANCELLED", signal=15)
    assert parse_job("slurm_load_jobs error") is None
