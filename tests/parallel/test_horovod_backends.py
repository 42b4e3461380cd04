"""`tfdistkit run --backend horovod` and `--backend mpi`: real ranks, with and without Horovod itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import Job, job, needs_mpirun, run_job, wait_until, write_script

from tfdistkit.launcher.local.watchdog import process_state

pytestmark = pytest.mark.usefixtures("whole_exit")

ROOT = Path(__file__).parents[2]
BACKENDS = ["horovod", pytest.param("mpi", marks=needs_mpirun)]

TELL = """
    import json, os, tfdistkit
    from tfdistkit.cluster import detect_cluster
    spec = detect_cluster()
    print(json.dumps([spec.rank, spec.world_size, spec.local_rank, spec.local_world_size, spec.has_addresses,
                      "TF_CONFIG" in os.environ]))
"""

# Reports when all ranks are training, then runs the given fault on rank 1.
ALL_REDUCE = """
    import os, signal, sys, time
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf, horovod.tensorflow as hvd
    if os.environ["TFDISTKIT_RANK"] == "1":
        time.sleep(float(os.environ.get("LATE", "0")))
    hvd.init()
    def total():
        return hvd.allreduce(tf.constant([1.0 + hvd.rank(), 10.0]), op=hvd.Sum).numpy().tolist()
    print(hvd.size(), hvd.local_rank(), total(), "mpi" if hvd.mpi_enabled() else "gloo", flush=True)
    fault = sys.argv[1] if hvd.rank() == 1 else ""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise ValueError("the cause")
    while sys.argv[1] != "end":
        total()
        time.sleep(0.05)
    if hvd.gloo_enabled():  # MPI cannot be initialised twice.
        hvd.shutdown()
        hvd.init()
        print("again", total(), flush=True)
"""


def lines_by_rank(stdout: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        rank, _, text = line.partition("] ")
        found.setdefault(rank.lstrip("["), []).append(text)
    return found


def with_horovod(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_rank_gets_its_rank_and_local_rank(tmp_path: Path, backend: str) -> None:
    shell = {"TF_CONFIG": '{"cluster": {}}', "HOROVOD_RANK": "7", "HOROVOD_SIZE": "9"}
    ended = run_job("-np", "2", "--backend", backend, write_script(tmp_path, TELL), cwd=tmp_path, **shell)
    assert ended.code == 0, ended.stderr
    assert "TF_CONFIG of this shell is not used: the workers get none" in ended.stderr
    reported = {rank: json.loads(text) for rank, [text] in lines_by_rank(ended.stdout).items()}
    assert reported == {str(rank): [rank, 2, rank, 2, False, False] for rank in (0, 1)}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tfdistkit")] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_failure_is_reported_with_its_exit_code(tmp_path: Path, backend: str) -> None:
    script = "import os, sys, time\nif os.environ['TFDISTKIT_RANK'] == '1': sys.exit(7)\ntime.sleep(600)"
    ended = run_job("-np", "2", "--backend", backend, write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 7
    assert "rank 1 ended with exit code 7" in ended.stderr and "Stopped because of it: rank 0." in ended.stderr


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(tmp_path: Path, backend: str, number: int) -> None:
    with job("-np", "2", "--backend", backend, write_script(tmp_path, SLEEP), cwd=tmp_path) as running:
        wait_for_ranks(running, tmp_path)
        running.process.send_signal(number)
        assert running.end().code == 128 + number
        assert running.left() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_outlives_a_killed_launcher(tmp_path: Path, backend: str) -> None:
    with job("-np", "2", "--backend", backend, write_script(tmp_path, SLEEP), cwd=tmp_path) as running:
        wait_for_ranks(running, tmp_path)
        running.process.kill()
        running.process.wait(timeout=30)
        wait_until(lambda: running.left() == [], "the end of all processes")


SLEEP = """
    import os, pathlib, time
    pathlib.Path("rank." + os.environ["TFDISTKIT_RANK"]).touch()
    time.sleep(600)
"""


def wait_for_ranks(running: Job, folder: Path) -> None:
    running.wait_for_files(folder / "rank.0", folder / "rank.1")


def test_without_mpirun(tmp_path: Path) -> None:
    ended = run_job("-np", "2", "--backend", "mpi", write_script(tmp_path, TELL), cwd=tmp_path, PATH=str(tmp_path))
    assert ended.code == 2
    assert "`mpirun` was not found." in ended.stderr and "apt-get install openmpi-bin" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "echo 'There are no slots'; exit 3",
            "mpirun did not start 2 ranks. Received: exit code 3.\nIts output:\nThere",
        ),
        # Another MPI's: it starts the command, and calls the ranks by other names.
        ('while [ "$1" != -np ]; do shift; done; shift 2; exec "$@"', "`mpirun` must be Open MPI's"),
    ],
)
def test_an_unusable_mpirun(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n{body}\n")
    mpirun.chmod(0o755)
    path = os.pathsep.join([str(mpirun.parent), os.environ["PATH"]])
    ended = run_job("-np", "2", "--backend", "mpi", write_script(tmp_path, TELL), cwd=tmp_path, PATH=path)
    assert ended.code == 2 and words in ended.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tfdistkit")] == []


@needs_mpirun
def test_a_script_under_plain_mpirun(tmp_path: Path) -> None:
    mpirun = [str(shutil.which("mpirun")), *["--allow-run-as-root"] * (os.geteuid() == 0), "--oversubscribe"]
    command = [*mpirun, "-np", "2", sys.executable, write_script(tmp_path, TELL)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    reported = sorted(json.loads(line) for line in ended.stdout.splitlines())
    assert reported == [[rank, 2, rank, 2, False, False] for rank in (0, 1)]


@pytest.mark.horovod
@pytest.mark.tensorflow
@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_all_reduce(tmp_path: Path, library: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("horovod_with_mpi" if library == "mpi" else "horovod_path")
    backend = "mpi" if library == "mpi" else "horovod"
    script = write_script(tmp_path, ALL_REDUCE)
    # Longer than Gloo's own timeout: the launcher holds rank 0 until rank 1 is ready.
    late = {"LATE": "6", "HOROVOD_GLOO_TIMEOUT_SECONDS": "3"} if library == "gloo" else {}
    with job("-np", "2", "--backend", backend, script, "end", cwd=tmp_path, **with_horovod(folder), **late) as running:
        ended = running.end(deadline_s=200)
        assert ended.code == 0, ended.stderr
        assert running.left() == []
    for rank, lines in lines_by_rank(ended.stdout).items():
        again = ["again [3.0, 20.0]"] if library == "gloo" else []
        assert lines == [f"2 {rank} [3.0, 20.0] {library}", *again]


@pytest.mark.horovod
@pytest.mark.tensorflow
@pytest.mark.parametrize("library", ["gloo", "mpi"])
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [("kill", 137, "rank 1 was killed by SIGKILL"), ("raise", 1, "rank 1 raised ValueError")],
)
def test_a_fault_of_one_rank_is_the_first_cause(
    tmp_path: Path, library: str, fault: str, code: int, words: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue("horovod_with_mpi" if library == "mpi" else "horovod_path")
    backend = "mpi" if library == "mpi" else "horovod"
    script = write_script(tmp_path, ALL_REDUCE)
    with job("-np", "2", "--backend", backend, script, fault, cwd=tmp_path, **with_horovod(folder)) as running:
        ended = running.end(deadline_s=200)
        assert ended.code == code, ended.stderr
        assert running.left() == []
    assert words in ended.stderr.partition("the first failure was")[2].splitlines()[1]


@pytest.mark.horovod
@pytest.mark.tensorflow
@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_a_suspended_rank_ends_the_job(tmp_path: Path, library: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("horovod_with_mpi" if library == "mpi" else "horovod_path")
    backend = "mpi" if library == "mpi" else "horovod"
    script = write_script(tmp_path, ALL_REDUCE)
    variables = {**with_horovod(folder), "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    with job("-np", "2", "--backend", backend, script, "go on", cwd=tmp_path, **variables) as running:
        wait_until(lambda: running.stdout.count(library) == 2, "both ranks at work", deadline_s=150)
        suspend_rank_1(tmp_path)
        ended = running.end(deadline_s=60)
        assert running.left() == []
    assert ended.code != 0
    assert "rank 1 had been suspended (SIGSTOP), which blocked the other processes." in ended.stderr


@needs_mpirun
def test_a_suspended_worker_of_mpi_ends_the_job(tmp_path: Path) -> None:
    script, patience = write_script(tmp_path, SLEEP), "HOROVOD_GLOO_TIMEOUT_SECONDS=2"
    with job("-np", "2", "--backend", "mpi", "--env", patience, script, cwd=tmp_path) as running:
        wait_for_ranks(running, tmp_path)
        suspend_rank_1(tmp_path)
        ended = running.end()
        assert running.left() == []
    assert ended.code == 1
    assert "rank 1 had been suspended (SIGSTOP)" in ended.stderr and "ranks 0, 1" in ended.stderr


def suspend_rank_1(folder: Path) -> None:
    events = next(folder.glob("tfdistkit-*/events.jsonl")).read_text().splitlines()
    pids = {event["rank"]: event["pid"] for event in map(json.loads, events) if event["event"] == "worker_started"}
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(lambda: process_state(pids[1]) == "T", "rank 1 suspended")


KEPT = {
    "optimizer": "model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), 'mse')",
    "callback": "model.fit(x, x, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])",
}


@pytest.mark.tensorflow
@pytest.mark.horovod
@pytest.mark.parametrize("kept", KEPT)
def test_a_script_that_keeps_classes_of_horovod_is_told_to_remove_them(
    tmp_path: Path, horovod_path: Path, kept: str
) -> None:
    script = f"""
    import tfdistkit
    strategy = tfdistkit.strategy("horovod")
    import horovod.tensorflow.keras as hvd
    import keras, numpy as np
    x = np.ones((8, 1), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        {KEPT[kept]}
    """
    program, more = write_script(tmp_path, script), with_horovod(horovod_path)
    ended = run_job("-np", "2", "--backend", "horovod", program, cwd=tmp_path, **more)
    assert ended.code == 1
    advice = "Remove hvd.DistributedOptimizer, hvd.DistributedGradientTape, hvd.broadcast_variables and hvd.callbacks"
    assert advice in ended.stderr, ended.stderr
