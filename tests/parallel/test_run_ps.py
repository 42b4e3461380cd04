"""`tfdistkit run --ps`: a coordinator, workers and servers as real processes, and the failure of each role."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cast_script import play
from job_process import job, needs_mpirun, run_job, wait_until, write_script

from tfdistkit.report import read_events

EVERYBODY = ["chief.0", "worker.0", "worker.1", "ps.0", "ps.1"]

# All roles tell what they know; then the coordinator ends, and the others with it.
TELL = """
import tfdistkit
known = {"rank": tfdistkit.rank() if role != "ps" else None, "size": tfdistkit.world_size(),
         "local": tfdistkit.local_rank(), "is_chief": tfdistkit.is_chief(), "argv": sys.argv[1:],
         "mpi": os.environ.get("OMPI_COMM_WORLD_RANK")}
known["env"] = {name: value for name, value in os.environ.items() if name.startswith(("TF_", "TFDISTKIT_"))}
print(json.dumps(known), flush=True)
"""


def ends(folder: Path) -> dict[str, int]:
    """How each process ended, of those that ended before they were stopped."""
    return {event["process"]: event["exit_code"] for event in read_events(folder) if event["event"] == "worker_ended"}


@pytest.mark.parametrize("backend", ["local", pytest.param("mpi", marks=needs_mpirun)])
def test_every_role_gets_its_task_and_ends_with_the_coordinator(tmp_path: Path, backend: str) -> None:
    script = write_script(tmp_path, play("print('done')", before=TELL))
    words = ["-q", "--backend", backend, "--ps", "2", "-np", "2", "--log-dir", "logs"]
    ended = run_job(*words, script, "--lr", "1", cwd=tmp_path)
    assert (ended.code, ended.stderr) == (0, "")
    logs = tmp_path / "logs"
    assert sorted(path.name for path in logs.iterdir()) == sorted([*EVERYBODY, "events.jsonl"])
    clusters, tasks = set(), []
    for number, name in enumerate(EVERYBODY):
        role, index = name.split(".")
        facts = json.loads((logs / name / "stdout").read_text().splitlines()[0])
        config = json.loads(facts["env"]["TF_CONFIG"])
        assert config["task"] == {"type": role, "index": int(index)}
        clusters.add(json.dumps(config["cluster"]))
        tasks = [address for addresses in config["cluster"].values() for address in addresses]
        is_worker = role == "worker"
        rank = None if role == "ps" else int(index)
        assert [facts[what] for what in ("rank", "size", "is_chief")] == [rank, 2, role == "chief"]
        assert (facts["local"], facts["argv"]) == (int(index) if is_worker else 0, ["--lr", "1"])
        assert facts["mpi"] == (str(number) if backend == "mpi" else None)
        variables = facts["env"]
        assert variables["TFDISTKIT_TASK_DIR"] == str(logs / name) and variables["TFDISTKIT_RUN_DIR"] == str(logs)
        assert (variables["TFDISTKIT_ATTEMPT"], variables["TFDISTKIT_RANK"]) == ("0", index)
        assert variables["TFDISTKIT_LOCAL_WORLD_SIZE"] == ("2" if is_worker else "1")
        share = max(1, len(os.sched_getaffinity(0)) // 2)
        assert int(variables["TF_NUM_INTRAOP_THREADS"]) == (share if is_worker else min(share, 4))
    assert len(clusters) == 1 and len(tasks) == len(set(tasks)) == 5
    lines = ended.stdout.splitlines()
    assert {"[chief] met worker 1", "[chief] done", "[worker 0] serving", "[ps 1] serving"} <= set(lines)
    everybody = {event["process"] for event in read_events(logs) if event["event"] == "worker_started"}
    assert everybody == {"chief", "worker 0", "worker 1", "ps 0", "ps 1"}
    assert ends(logs) == dict.fromkeys(everybody, 0), "they end by themselves"
    assert "stopping" not in [event["event"] for event in read_events(logs)]


def test_a_dry_run_shows_all_roles(tmp_path: Path) -> None:
    ended = run_job("--ps", "1", "-np", "2", "--dry-run", write_script(tmp_path, "1 / 0"), cwd=tmp_path)
    assert ended.code == 0
    names = [line.partition(": ")[0] for line in ended.stdout.splitlines()]
    assert names == ["chief", "worker 0", "worker 1", "ps 0"]
    assert '"task": {"type": "ps", "index": 0}' in ended.stdout.splitlines()[3]


def test_a_failed_coordinator_fails_the_job_and_stops_the_servers(tmp_path: Path) -> None:
    script = write_script(tmp_path, play("sys.exit(3)"))
    ended = run_job("--ps", "2", "-np", "2", "--log-dir", "logs", script, "stubborn", cwd=tmp_path)
    assert ended.code == 3
    assert "the first failure was\nchief ended with exit code 3 (host" in ended.stderr
    assert f"log: {tmp_path}/logs/chief.0/stderr" in ended.stderr
    assert "Stopped because of it: worker 0, worker 1, ps 0, ps 1." in ended.stderr


def test_the_job_continues_without_a_worker_and_ends_with_the_last(tmp_path: Path) -> None:
    """One worker is killed. The other is suspended, which counts as a failure: it blocks its scheduled steps."""
    coordinator = """
me.kill("worker 0")
me.wait_for("on")
os.kill(me.pids["worker 1"], signal.SIGSTOP)
me.wait_for("never")
"""
    with job("--ps", "1", "-np", "2", write_script(tmp_path, play(coordinator)), cwd=tmp_path) as running:
        message = f"tfdistkit: worker 0 was killed by SIGKILL (host {os.uname().nodename}, pid "
        wait_until(lambda: message in running.stderr_path.read_text(), "the message about worker 0")
        assert running.process.poll() is None
        (tmp_path / "on").touch()
        ended = running.end()
        assert running.left() == []
    (run_dir,) = tmp_path.glob("tfdistkit-*")
    line = next(line for line in ended.stderr.splitlines() if line.startswith(message))
    assert "exit code 137" in line and "the job continues without it" in line
    assert line.endswith(f"Its log: {run_dir}/worker.0/stderr")
    assert ended.code == 137
    assert "the first failure was\nworker 0 was killed by SIGKILL (host" in ended.stderr
    assert "Later, worker 1 was killed by SIGKILL too." in ended.stderr
    assert "Stopped because of it: chief, ps 0." in ended.stderr
    assert [event["reason"] for event in read_events(run_dir) if event["event"] == "worker_killed"] == ["suspended"]


def test_a_worker_restarts_at_its_address_while_restarts_are_left(tmp_path: Path) -> None:
    coordinator = """
first = me.pids["worker 1"]
me.kill("worker 1")
me.meet(1)
print("again", first != me.pids["worker 1"], flush=True)
me.kill("worker 1")
me.wait_for("on")
"""
    words = ("--ps", "1", "-np", "2", "--max-restarts", "1")
    with job(*words, write_script(tmp_path, play(coordinator)), cwd=tmp_path) as running:
        message = "the job continues without it"
        wait_until(lambda: message in running.stderr_path.read_text(), "the second failure")
        (tmp_path / "on").touch()
        ended = running.end()
        assert running.left() == []
    assert ended.code == 0
    assert ended.stdout.count("[chief] met worker 1") == 2 and "[chief] again True" in ended.stdout
    assert ended.stdout.count("[worker 1] serving") == 2
    assert "it restarts at the same address (restart 1 of 1)." in ended.stderr
    assert "the job succeeded after" in ended.stderr and ended.stderr.count("Earlier: worker 1 was killed by") == 2
    (run_dir,) = tmp_path.glob("tfdistkit-*")
    assert f"All logs and events: {run_dir}" in ended.stderr, "logs of incidents are kept"
    for folder in ("worker.1", "worker.1/restart.1"):
        assert (run_dir / folder / "stdout").read_text() == "serving\n"
    started = [event for event in read_events(run_dir) if event["event"] in ("worker_started", "worker_restarted")]
    assert [event["process"] for event in started] == ["chief", "worker 0", "worker 1", "ps 0", "worker 1"]


def test_workers_that_fail_in_the_same_place_again_are_given_up(tmp_path: Path) -> None:
    script = "import os, time\nif '\"type\": \"worker\"' in os.environ['TF_CONFIG']:\n    undefined\ntime.sleep(600)"
    ended = run_job("--ps", "1", "-np", "2", "--max-restarts", "9", write_script(tmp_path, script), cwd=tmp_path)
    notes, _, report = ended.stderr.partition("tfdistkit: the job failed")
    assert ended.code == 1 and notes.count("it restarts at the same address") == 2
    assert notes.count("it failed in the same place again, so it is not restarted") == 2 and "NameError" in report


def test_a_lost_server_or_coordinator_restarts_everything(tmp_path: Path) -> None:
    """A server dies, and the coordinator raises TensorFlow's error; then the coordinator dies; then it succeeds."""
    coordinator = """
pathlib.Path(f"ports.{attempt}").write_text(json.dumps(cluster))
if attempt == 0:
    me.kill("ps 1")
    raise ConnectionError("failed to connect to all addresses")
if attempt == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print("attempt", attempt, os.environ["TFDISTKIT_TASK_DIR"])
"""
    words = ("--ps", "2", "-np", "1", "--max-restarts", "2", "--log-dir", "logs")
    ended = run_job(*words, write_script(tmp_path, play(coordinator)), cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    first, second = ended.stderr.split("tfdistkit: everything starts again as attempt 1 (restart 1 of 2) in 1")
    assert "tfdistkit: attempt 0 failed after" in first
    assert "the first failure was\nps 1 was killed by SIGKILL" in first
    assert "the first failure was\nchief was killed by SIGKILL" in second and "attempt 2 (restart 2 of 2)" in second
    assert f"[chief] attempt 2 {tmp_path}/logs/attempt.2/chief.0" in ended.stdout
    assert "Earlier: ps 1 was killed by SIGKILL after" in second and "Earlier: chief was killed by SIGKILL" in second
    ports = [json.loads((tmp_path / f"ports.{attempt}").read_text()) for attempt in range(3)]
    assert ports[0] != ports[1] != ports[2] != ports[0]
    for folder in (tmp_path / "logs", tmp_path / "logs" / "attempt.1", tmp_path / "logs" / "attempt.2"):
        assert "met ps 0" in (folder / "chief.0" / "stdout").read_text()
        assert (folder / "worker.0" / "stdout").read_text() == "serving\n"
    events = read_events(tmp_path / "logs")
    assert [event["attempt"] for event in events if event["event"] == "job_restarting"] == [1, 2]
    assert (events[-1]["outcome"], events[-1]["attempt"]) == ("succeeded", 2)


def test_a_dead_server_ends_the_job_and_is_the_cause(tmp_path: Path) -> None:
    coordinator = """
me.kill("ps 0")
time.sleep(600)
"""
    ended = run_job("--ps", "1", "-np", "2", write_script(tmp_path, play(coordinator)), cwd=tmp_path)
    assert ended.code == 137
    assert "the first failure was\nps 0 was killed by SIGKILL (host" in ended.stderr
    assert "Stopped because of it: chief, worker 0, worker 1." in ended.stderr


def test_a_role_that_creates_no_strategy_is_reported(tmp_path: Path) -> None:
    script = "import os, time\nif '\"chief\", \"index\"' in os.environ['TF_CONFIG']:\n    time.sleep(600)"
    ended = run_job("--ps", "1", "-np", "1", "--max-restarts", "5", write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 1
    assert "ps 0 ended with exit code 0" in ended.stderr and "worker 0 ended with exit code 0" in ended.stderr
    assert 'the script did not reach tfdistkit.strategy("parameter_server")' in ended.stderr
    assert "Stopped because of it: chief." in ended.stderr
    assert "starts again" not in ended.stderr


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_reaches_every_role(tmp_path: Path, end: signal.Signals) -> None:
    before = """
pathlib.Path(f"{role}.{index}.up").touch()
def save(number, frame):
    print("saved", flush=True)
    time.sleep(role == "chief")  # Without it the others end by themselves, perhaps before they get the signal.
    os._exit(1)
signal.signal(signal.SIGINT, save)
"""
    script = write_script(tmp_path, play("time.sleep(600)", before))
    with job("--ps", "2", "-np", "2", "--max-restarts", "3", script, cwd=tmp_path) as running:
        running.wait_for_files(*(tmp_path / f"{name}.up" for name in EVERYBODY))
        wait_until(lambda: "[chief] met" in running.stdout, "the coordinator")
        running.process.send_signal(end)
        code = running.process.wait(timeout=30)
        wait_until(lambda: running.left() == [], "the end of all roles")
        if end == signal.SIGINT:
            assert code == 130
            assert sorted(line for line in running.stdout.splitlines() if "saved" in line) == sorted(
                f"[{name}] saved" for name in ("chief", "worker 0", "worker 1", "ps 0", "ps 1")
            )
