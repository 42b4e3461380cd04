"""`tfdistkit run --backend ray -np MIN:MAX` with a real Ray: the workers follow the room of the cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from counted_rows import RESULT, SETUP, require_each_row_once, rows_by_step
from job_process import Job, job, wait_until, write_script
from ray_cluster import VARIABLES, RayCluster, ray_cluster

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and os.environ.get("TFDISTKIT_REQUIRE_HOSTS") != "1",
    reason="Ray is not tested: it is not installed (pip install ray)",
)

DEADLINE_S = 240.0

# Trains, and waits for the test at a step of the first two attempts.
TRAIN = f"""
{SETUP}
steps = (here / f"steps.{{attempt}}.{{rank}}").open("w", buffering=1)


class Fate(keras.callbacks.Callback):
    epoch = 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        step = self.epoch * 12 + batch
        write_step(steps, step, self.model)
        if attempt == 0 and step == 17:
            (here / f"waits.0.{{rank}}").touch()
            time.sleep(600)  # until the loss of a node ends this attempt
        if attempt == 1 and step >= 20:
            (here / f"waits.1.{{rank}}").touch()
            time.sleep(0.3)  # until the launcher asks for a backup


history = model.fit(data, epochs=3, verbose=0, callbacks=[BackupAndResume(here / "backup", save_freq=5), Fate()])
{RESULT}
"""

# Stands in for training: makes a "backup" when it is asked, and trains until there is the file `enough`.
STAND_IN = """
    import os, pathlib, signal, time
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    attempt, rank, size = (os.environ[f"TFDISTKIT_{name}"] for name in ("ATTEMPT", "RANK", "LOCAL_WORLD_SIZE"))
    os.write(1, f"up {attempt} {rank} of {size} as {os.getpid()}\\n".encode())
    while not pathlib.Path("enough").exists():
        time.sleep(0.05)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a job on a cluster, and checks at the end that none of its processes is left."""
    running: list[Job] = []

    def starting(cluster: RayCluster, *words: str) -> Job:
        variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", **VARIABLES}
        options = ("--backend", "ray", "--ray-address", cluster.address, "--cool-down", "1", "--log-dir", "logs")
        running.append(Job(*options, *words, cwd=tmp_path, **variables))
        return running[-1]

    yield starting
    for one in running:
        one.sweep()


def wait_for(running: Job, is_so: Callable[[], bool], what: str) -> None:
    def is_so_or_over() -> bool:
        assert running.process.poll() is None, running.stderr_path.read_text()
        return is_so()

    wait_until(is_so_or_over, what, DEADLINE_S)


def wait_for_ranks(running: Job, attempt: int, size: int) -> list[int]:
    """Waits until all workers of an attempt are up, and returns their process ids."""
    pattern = re.compile(rf"up {attempt} \d of {size} as (\d+)$", re.MULTILINE)
    wait_for(running, lambda: len(pattern.findall(running.stdout)) == size, f"{size} workers of attempt {attempt}")
    return [int(pid) for pid in pattern.findall(running.stdout)]


@pytest.mark.tensorflow
def test_a_lost_node_and_a_new_one(start: Callable[..., Job], tmp_path: Path) -> None:
    """The training shrinks from 3 workers to 2 and grows to 3, and trains on each row once in each epoch."""
    with ray_cluster(tmp_path, nodes=3) as cluster:
        script = write_script(tmp_path, TRAIN)
        running = start(cluster, "-np", "2:4", "--threads-per-worker", "1", script, "multiworker")
        wait_for(running, lambda: len([*tmp_path.glob("waits.0.*")]) == 3, "step 17 of three workers")
        cluster.kill_node()
        wait_for(running, lambda: len([*tmp_path.glob("waits.1.*")]) == 2, "step 20 of two workers")
        cluster.add_node()
        ended = running.end(DEADLINE_S)
        assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
        assert running.left() == []
    assert "starting 3 workers (2 to 4) as Ray actors on the Ray cluster" in ended.stderr
    assert re.search(r"lost rank \d after .* s:\nrank \d was lost with its Ray actor on", ended.stderr), ended.stderr
    assert "the job continues with 2 workers instead of 3 on" in ended.stderr
    assert "the job continues with 3 workers instead of 2 on" in ended.stderr
    first, second, third = (rows_by_step(tmp_path.glob(f"steps.{attempt}.*")) for attempt in range(3))
    assert [{len(ranks) for ranks in one.values()} for one in (first, second, third)] == [{3}, {2}, {3}]
    assert min(second) == 15, "the steps since the last backup are lost"
    assert min(third) == max(second) + 1, "a growth loses no step"
    require_each_row_once(first, second, third)
    events = [json.loads(line) for line in (tmp_path / "logs" / "events.jsonl").read_text().splitlines()]
    changes = [(one["before"], one["workers"]) for one in events if one.get("event") == "workers_changed"]
    assert changes == [(3, 2), (2, 3)]


@pytest.mark.thorough
def test_it_waits_for_nodes(start: Callable[..., Job], tmp_path: Path) -> None:
    """A killed worker leaves its place free; below MIN the job waits for a node."""
    with ray_cluster(tmp_path, nodes=2) as cluster:
        running = start(cluster, "-np", "2:2", write_script(tmp_path, STAND_IN))
        os.kill(wait_for_ranks(running, 0, 2)[1], signal.SIGKILL)
        wait_for_ranks(running, 1, 2)
        cluster.kill_node()
        wait_for(running, lambda: "waits up to 600 s for room" in running.stderr_path.read_text(), "a wait")
        cluster.add_node()
        wait_for_ranks(running, 2, 2)
        (tmp_path / "enough").touch()
        ended = running.end(DEADLINE_S)
        assert ended.code == 0, ended.stderr
        assert running.left() == []
    assert "was killed by SIGKILL" in ended.stderr and "the job continues with 2 workers as before on" in ended.stderr
    assert "waits up to 600 s for room for 2 workers (now 1)." in ended.stderr


def test_a_cluster_of_its_own_has_room_for_its_cores(tmp_path: Path) -> None:
    words = ("--backend", "ray", "--ray-address", "local", "-np", "999:1000", write_script(tmp_path, STAND_IN))
    with job(*words, cwd=tmp_path, **VARIABLES) as running:
        ended = running.end(DEADLINE_S)
    assert ended.code == 2 and "MIN of `-np MIN:MAX` must be at most" in ended.stderr, ended.stderr
    assert "--cpus-per-worker 0.5" in ended.stderr
