"""`parameter_server` when processes are killed, stopped or restarted: it continues exactly, or raises an error."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_setup import COUNTING
from job_process import job, wait_until, write_script
from patience import longer
from role_processes import DEADLINE_S, Role, roles

from tfdistkit.report import read_events

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(900), pytest.mark.usefixtures("whole_exit")]

HEARTBEAT_S = 6
# A task that is silent for this long is named; the margin is for a busy machine.
NAMED_WITHIN_S = HEARTBEAT_S + 20
# A coordinator that exits normally ends its tasks.
ENDED_WITHIN_S = 10
ROWS, STEPS = 1200, 150
# Steps in flight on a worker that dies, which run again.
IN_FLIGHT = 8

# The coordinator runs one stage after the other; workers report each step.
STAGES = (
    f"""
    import pathlib, sys, time
    import tfdistkit
    strategy = tfdistkit.strategy("parameter_server", timeout_s=120, heartbeat_timeout_s={HEARTBEAT_S})
    N, BATCH = {ROWS}, 8
"""
    + COUNTING
    + """
    class Telling(keras.layers.Layer):
        def call(self, x, training=False):
            if training:
                tf.print("took a step", output_stream=sys.stderr)
            return x

    model = make(Telling, lambda: keras.layers.Dense(1000), lambda: keras.layers.Dense(500))

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                print(f"{stage} is under way", flush=True)
        def on_epoch_end(self, epoch, logs=None):
            print(f"{stage} ended an epoch", flush=True)
            self.model.stop_training = stage == "own data" or pathlib.Path(f"{stage}.enough").exists()

    def of_worker(context):
        own = tf.data.Dataset.from_tensor_slices((x, y))
        return own.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)

    def fit(stage):
        if stage == "own data":
            own = strategy.distribute_datasets_from_function(of_worker)
            return model.fit(own, epochs=1000, verbose=0, callbacks=[Tell()])
        backup = tfdistkit.callbacks.BackupAndResume(stage, save_freq=40)
        backup = [backup] if stage in ("backup", "signalled") else []
        epochs = {"backup": 5, "signalled": 5, "again": 2}.get(stage, 1000)
        return model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[Tell(), *backup])

    for stage in sys.argv[1].split(","):
        found = {"from": int(model.optimizer.iterations) if model.built else 0}
        try:
            history = fit(stage)
            found.update(history.history, epochs=history.epoch, to=int(model.optimizer.iterations))
        except Exception as error:
            if stage == "the last":
                raise
            found["error"] = [type(error).__name__, str(error)]
        print(f"{stage} came to {json.dumps(found)}", flush=True)
"""
)


def result(chief: Role, stage: str) -> dict[str, Any]:
    """Waits for a stage, and returns its result."""
    said = f"{stage} came to "
    chief.wait_for(said)
    wait_until(lambda: chief.printed.rpartition(said)[2].endswith("\n"), "a whole line")
    return json.loads(chief.printed.rpartition(said)[2].splitlines()[0])


def exact(found: dict[str, Any]) -> bool:
    """Returns whether each epoch used each row exactly once."""
    assert "error" not in found, found["error"]
    return found["seen"] == found["once"] == [ROWS] * len(found["epochs"])


def test_workers_and_the_coordinator_are_killed_and_start_again(tmp_path: Path) -> None:
    with roles(tmp_path, STAGES) as running:
        chief = running.start_all("killed,backup")

        # A worker dies; two epochs run without it; it restarts, and takes part.
        chief.wait_for("killed is under way")
        running.running["worker 0"].kill()
        chief.wait_for("killed ended an epoch", chief.printed.count("killed ended an epoch") + 2)
        running.start("worker 0").wait_for("took a step", 5)
        (tmp_path / "killed.enough").touch()
        found = result(chief, "killed")
        assert exact(found) and len(found["epochs"]) >= 3
        assert 0 <= found["to"] - found["from"] - STEPS * len(found["epochs"]) <= IN_FLIGHT

        # The coordinator dies; its tasks stay, and it resumes from its backup.
        begun = found["to"]
        chief.wait_for(
            "backup is under way", 3
        )  # In the third epoch: while Keras writes a backup, there is no complete one.
        chief.kill()
        chief = running.start("chief 0", "backup,own data,gone")
        found = result(chief, "backup")
        assert exact(found) and found["epochs"] == [0, 1, 2, 3, 4]
        assert found["to"] == begun + 5 * STEPS
        assert all(one.process.poll() is None for one in running.running.values())

        # A worker with its own data dies and does not restart: the epoch ends with the data of the other one.
        chief.wait_for("own data is under way")
        running.running["worker 1"].kill()
        found = result(chief, "own data")
        assert found["seen"] == found["once"] and ROWS / 2 <= found["seen"][0] <= ROWS

        # The last worker dies.
        chief.wait_for("gone is under way")
        start = time.monotonic()
        running.running["worker 0"].kill()
        kind, message = result(chief, "gone")["error"]
        assert time.monotonic() - start < longer(NAMED_WITHIN_S)
        assert kind == "UnavailableError" and "There is no worker left" in message
        for name in ("worker 0", "worker 1"):
            assert f"{name} at {running.addresses[name]}: nothing listens there" in message
        assert chief.end() == 0
        assert running.running["ps 0"].end(ENDED_WITHIN_S) == 0
        assert running.left() == []
        assert "Failed to remove function remotely" not in chief.printed


@pytest.mark.thorough
def test_all_tasks_get_a_signal_and_restart(tmp_path: Path) -> None:
    """As under a scheduler: the coordinator writes a last backup, while its tasks still serve it."""
    with roles(tmp_path, STAGES) as running:
        chief = running.start_all("signalled")
        chief.wait_for("signalled is under way", 2)
        for role in reversed(running.running.values()):
            role.process.send_signal(signal.SIGUSR1)
        assert chief.end(NAMED_WITHIN_S) == -signal.SIGUSR1
        for name in ("worker 0", "worker 1", "ps 0"):
            assert running.running[name].end(ENDED_WITHIN_S) == 0
        assert (tmp_path / "signalled" / "training.backup").exists()

        chief = running.start_all("signalled")
        found = result(chief, "signalled")
        assert exact(found) and found["epochs"] == [0, 1, 2, 3, 4] and found["to"] == 5 * STEPS
        assert 0 < chief.printed.count("signalled ended an epoch") < 5
        assert chief.end() == 0
        assert running.left() == []


def test_a_stopped_task_and_a_dead_server_are_named(tmp_path: Path) -> None:
    with roles(tmp_path, STAGES) as running:
        chief = running.start_all("silent,again,frozen,again,the last")
        again = 0
        for stage, name, called in (("silent", "worker 1", "Worker 1"), ("frozen", "ps 0", "Parameter server 0")):
            chief.wait_for(f"{stage} is under way")
            start = time.monotonic()
            running.running[name].stop()
            kind, message = result(chief, stage)["error"]
            assert time.monotonic() - start < longer(NAMED_WITHIN_S)
            assert kind == "UnavailableError"
            assert f"{called} has shown no sign of life for {HEARTBEAT_S} seconds" in message
            assert f"{name} at {running.addresses[name]}: accepts connections but does not answer" in message
            running.running[name].go_on()
            again += 1
            chief.wait_for("again came to", again)
            assert exact(result(chief, "again"))

        chief.wait_for("the last is under way")
        start = time.monotonic()
        running.running["ps 0"].kill()
        assert chief.end() == 1
        assert time.monotonic() - start < longer(30)
        address = running.addresses["ps 0"]
        assert f"UnavailableError: Parameter server 0 ({address}) is gone, and the variables on it" in chief.printed
        time.sleep(3)
        for name in ("worker 0", "worker 1"):  # They wait for a restart of the coordinator, as after a kill.
            assert running.running[name].process.poll() is None
            running.running[name].process.terminate()
            assert running.running[name].end() == -signal.SIGTERM
        assert running.left() == []


LAUNCHED = (
    f"""
    import json, os, pathlib, signal, time
    import tfdistkit
    strategy = tfdistkit.strategy("parameter_server", heartbeat_timeout_s=60)
    N, BATCH = {ROWS}, 8
"""
    + COUNTING
    + """
    folder = pathlib.Path(os.environ["TFDISTKIT_RUN_DIR"])
    def events(kind):
        lines = (folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]
    class Fate(keras.callbacks.Callback):
        stopped = False
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20 and not self.stopped:
                self.stopped = True
                pid, = (one["pid"] for one in events("worker_started") if one["process"] == "worker 1")
                os.kill(pid, signal.SIGSTOP)
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = bool(events("worker_killed")) and epoch > 1
    model = make()
    seen = train(model, x, y, batch_size=BATCH, epochs=1000, callbacks=[Fate()])
    print(json.dumps([seen["seen"], seen["once"], min(seen["used"]), max(seen["used"])]))
"""
)


@pytest.mark.thorough
def test_the_launcher_kills_a_stopped_worker_and_its_steps_go_to_the_other(tmp_path: Path) -> None:
    words = ("--ps", "1", "-np", "2", "--log-dir", "logs", "--threads-per-worker", "1")
    with job(*words, write_script(tmp_path, LAUNCHED), cwd=tmp_path, CUDA_VISIBLE_DEVICES="-1") as running:
        ended = running.end(DEADLINE_S)
        assert running.left() == []
    assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
    logs = tmp_path / "logs"
    seen, once, least, most = json.loads((logs / "chief.0" / "stdout").read_text().splitlines()[-1])
    assert seen == once == [ROWS] * len(seen) and len(seen) >= 3
    assert len(seen) == least <= most <= len(seen) + 1
    (killed,) = [event for event in read_events(logs) if event["event"] == "worker_killed"]
    assert (killed["process"], killed["reason"]) == ("worker 1", "suspended")
    assert "the job continues without it" in ended.stderr


@contextlib.contextmanager
def another_machine() -> Iterator[tuple[str, str, str]]:
    """Makes a network namespace linked to this one: its name, our address, and its address. Needs root."""
    name, cable = f"tfdk{os.getpid()}", f"tf{os.getpid()}"
    # Unique addresses, so that routes of an earlier run are not reused.
    first = ipaddress.ip_address("198.18.0.0") + 4 * random.SystemRandom().randrange(2**15)
    here, there = str(first + 1), str(first + 2)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("TFDISTKIT_REQUIRE_HOSTS"):  # As for the tests of several hosts: fail instead of skip.
            raise
        pytest.skip(f"no network namespace can be made here: {getattr(error, 'stderr', error)}")
    try:
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{here}/30", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "addr", "add", f"{there}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "eth0", "up")
        yield name, here, there
    finally:
        # The namespace alone would remove the link some time later.
        subprocess.run(["ip", "link", "del", cable], check=False, capture_output=True, timeout=30)
        ip("netns", "del", name)


def cut_link(machine: str) -> None:
    """Cuts the link."""
    subprocess.run(["ip", "-n", machine, "link", "set", "eth0", "down"], check=True, timeout=30)


def test_a_worker_that_is_cut_off_is_named(tmp_path: Path) -> None:
    with another_machine() as (machine, here, there):
        hosts = {"chief 0": here, "ps 0": here, "worker 0": here, "worker 1": there}

        def within(host: str) -> list[str]:
            return ["ip", "netns", "exec", machine] if host == there else []

        with roles(tmp_path, STAGES, hosts=hosts, within=within) as running:
            chief = running.start_all("cut for good")
            chief.wait_for("cut for good is under way")
            start = time.monotonic()
            cut_link(machine)
            kind, message = result(chief, "cut for good")["error"]
            assert time.monotonic() - start < longer(NAMED_WITHIN_S)
            assert kind == "UnavailableError"
            assert f"Worker 1 has shown no sign of life for {HEARTBEAT_S} seconds" in message
            assert f"worker 1 at {running.addresses['worker 1']}: accepts connections but does not answer" in message
            assert chief.end(NAMED_WITHIN_S) == 0
            for name in ("worker 0", "ps 0"):
                assert running.running[name].end(ENDED_WITHIN_S) == 0
            running.running["worker 1"].kill()  # It cannot detect the cut.
            assert running.left() == []
