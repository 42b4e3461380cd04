"""`-np MIN:MAX` as a user starts it, with scripts that stand in for training: they make a "backup" when asked."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from job_process import DEADLINE_S, Job, job, run_job, wait_until, write_script

from tfdistkit.report import read_events

# Trains until the file `enough` is there; a rank dies where the file `die.<attempt>.<rank>` is.
TRAIN = """
    import os, pathlib, signal, sys, time
    from tfdistkit.cluster import detect_cluster
    attempt, rank = int(os.environ["TFDISTKIT_ATTEMPT"]), int(os.environ["TFDISTKIT_RANK"])
    workers = detect_cluster().world_size
    assert os.environ["TFDISTKIT_ELASTIC"].count(":") == 1
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    deaf = pathlib.Path("deaf")
    while deaf.exists():
        time.sleep(0.02)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as BackupAndResume when all have saved
    print("attempt", attempt, "of", workers, flush=True)
    pathlib.Path(f"up.{attempt}.{rank}").touch()
    while not pathlib.Path("enough").exists():
        fate = pathlib.Path(f"die.{attempt}.{rank}")
        if fate.exists():
            how = fate.read_text()
            if how == "raise":
                raise ValueError("not elastic")
            if how == "later":
                sys.exit(75)
            os.kill(os.getpid(), int(how or signal.SIGKILL))
        time.sleep(0.02)
"""


class Elastic:
    """A running elastic job in a folder."""

    def __init__(self, running: Job, folder: Path):
        self.running, self.folder = running, folder

    def wait_for(self, attempt: int, workers: int) -> None:
        """Waits until all workers of an attempt are there."""
        self.running.wait_for_files(*(self.folder / f"up.{attempt}.{rank}" for rank in range(workers)))
        assert not (self.folder / f"up.{attempt}.{workers}").exists()

    def kill(self, attempt: int, rank: int, how: str = "") -> None:
        (self.folder / "new").write_text(how)
        (self.folder / "new").rename(self.folder / f"die.{attempt}.{rank}")

    def wait_for_note(self, text: str) -> None:
        wait_until(lambda: text in self.stderr, f"{text!r} in {self.stderr}")

    @property
    def stderr(self) -> str:
        return self.running.stderr_path.read_text(encoding="utf-8")

    def end(self) -> str:
        """Lets the job come to its end, and returns what the launcher said."""
        (self.folder / "enough").touch()
        ended = self.running.end()
        assert ended.code == 0, ended.stderr
        assert self.running.left() == []
        return ended.stderr


def discovery(folder: Path, hosts: str) -> str:
    """Writes a discovery script that prints what is in the file `hosts`."""
    say(folder, hosts)
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    path.chmod(0o755)
    return str(path)


def say(folder: Path, hosts: str) -> None:
    (folder / "hosts.new").write_text(hosts)
    (folder / "hosts.new").rename(folder / "hosts")


def events_of(folder: Path, name: str) -> list[dict[str, object]]:
    return [event for event in read_events(folder / "logs") if event["event"] == name]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_lost_worker_leaves_a_smaller_job(tmp_path: Path, how: int) -> None:
    words = ("-np", "2:3", "--log-dir", "logs", write_script(tmp_path, TRAIN))
    with job(*words, cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for(0, 3)
        elastic.kill(0, 2, str(int(how)))
        elastic.wait_for(1, 2)
        stderr = elastic.end()
    name = signal.Signals(how).name
    assert "lost rank 2 after" in stderr and f"rank 2 was killed by {name} (host" in stderr
    assert "the job continues with 2 workers instead of 3, from its last backup." in stderr
    assert f"Earlier: rank 2 was killed by {name} after" in stderr
    assert ": the job continued with 2 workers instead of 3." in stderr
    assert "restart" not in stderr and "starts again" not in stderr
    (change,) = events_of(tmp_path, "workers_changed")
    assert (change["workers"], change["before"]) == (2, 3)
    assert (tmp_path / "logs" / "attempt.1" / "rank.1" / "stdout").read_text() == "attempt 1 of 2\n"


def test_below_the_fewest_a_loss_is_a_failure(tmp_path: Path) -> None:
    words = ("-np", "2:3", "--max-restarts", "1", write_script(tmp_path, TRAIN))
    with job(*words, cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        for attempt, workers in ((0, 3), (1, 2), (2, 3)):
            elastic.wait_for(attempt, workers)
            elastic.kill(attempt, 0)
        elastic.wait_for(3, 2)
        elastic.kill(3, 1)
        ended = running.end()
        assert running.left() == []
    assert ended.code == 137
    assert "tfdistkit: there is room for 1 worker, and the job needs 2: a failure." in ended.stderr
    assert ended.stderr.count("everything starts again as attempt 2 (restart 1 of 1)") >= 1
    assert "tfdistkit: attempt 3, the last one, failed" in ended.stderr


def test_restarts_of_long_ago_do_not_count(tmp_path: Path) -> None:
    words = ("-np", "1", "--max-restarts", "1", "--restart-window", "0.1")
    script = "import os, sys\nsys.exit(75 * (int(os.environ['TFDISTKIT_ATTEMPT']) < 2))"
    ended = run_job(*words, write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("(restart 1 of 1 within 0.1 s)") >= 2


def test_an_exception_is_no_loss(tmp_path: Path) -> None:
    with job("-np", "1:3", write_script(tmp_path, TRAIN), cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for(0, 3)
        elastic.kill(0, 2, "raise")
        ended = running.end()
        assert running.left() == []
    assert ended.code == 1 and "rank 2 raised ValueError" in ended.stderr
    assert "continues with" not in ended.stderr and "up.1.0" not in [path.name for path in tmp_path.iterdir()]


def test_a_script_that_does_not_name_the_callback_is_hinted_at(tmp_path: Path) -> None:
    hint = "train.py does not name BackupAndResume"
    for np, text, is_hinted in (("1:2", "", True), ("1:2", "# BackupAndResume", False), ("2", "", False)):
        ended = run_job("-np", np, write_script(tmp_path, text, "train.py"), cwd=tmp_path)
        assert ended.code == 0 and (hint in ended.stderr) == is_hinted, ended.stderr


def test_quick_losses_one_after_another_are_a_failure(tmp_path: Path) -> None:
    script = """
        import os, signal
        if os.environ["TFDISTKIT_RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()
    """
    words = ("-np", "1:9", write_script(tmp_path, script))
    ended = run_job(*words, cwd=tmp_path)
    assert ended.code == 139
    assert ended.stderr.count("the job continues with") == 3
    assert "4 times in a row workers were lost within 60 s of their start: a failure." in ended.stderr


@pytest.mark.parametrize("backend", ["local", "horovod"])
def test_discovery_lets_a_job_grow_and_shrink(tmp_path: Path, backend: str) -> None:
    options = (
        "--backend",
        backend,
        "--host-discovery-script",
        discovery(tmp_path, "localhost:2"),
        "--cool-down",
        "0.1",
    )
    words = ("-np", "2:3", *options, "--log-dir", "logs", "-v", write_script(tmp_path, TRAIN))
    with job(*words, cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for(0, 2)
        say(tmp_path, "localhost:4")
        elastic.wait_for(1, 3)
        say(tmp_path, "localhost:2")
        elastic.wait_for(2, 2)
        stderr = elastic.end()
    assert f"starting 2 workers (2 to 3){' for Horovod' * (backend == 'horovod')} on this machine" in stderr
    assert "there is room for 3 workers instead of 2: all ranks are asked for a backup." in stderr
    assert "the job continues with 3 workers instead of 2, from its last backup." in stderr
    assert "hosts are leaving, and there is room for 2 workers" in stderr
    # A planned change is neither a failure nor a restart.
    assert "the job succeeded after" in stderr and "Earlier" not in stderr and "despite" not in stderr
    assert "restart" not in stderr and "failed" not in stderr and "failure" not in stderr
    assert [event["workers"] for event in events_of(tmp_path, "workers_changed")] == [3, 2]
    assert events_of(tmp_path, "job_restarting") == []
    # A third rank's output is shown and kept.
    assert "[2] attempt 1 of 3\n" in running.stdout
    assert (tmp_path / "logs" / "attempt.1" / "rank.2" / "stdout").read_text() == "attempt 1 of 3\n"


def test_output_of_a_job_that_begins_with_one_worker(tmp_path: Path) -> None:
    options = ("--host-discovery-script", discovery(tmp_path, "localhost:1"), "--cool-down", "0.1")
    with job("-np", "1:2", *options, write_script(tmp_path, TRAIN), cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for(0, 1)
        say(tmp_path, "localhost:2")
        elastic.wait_for(1, 2)
        elastic.end()
    first, *rest = running.stdout.splitlines()
    assert first == "attempt 0 of 1" and sorted(rest) == ["[0] attempt 1 of 2", "[1] attempt 1 of 2"]


def test_workers_that_are_not_in_fit_are_asked_again(tmp_path: Path) -> None:
    (tmp_path / "deaf").touch()
    options = ("--host-discovery-script", discovery(tmp_path, "localhost:1"), "--cool-down", "0.1")
    with job("-np", "1:2", *options, write_script(tmp_path, TRAIN), cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for_note("starting 1 worker (1 to 2)")
        say(tmp_path, "localhost:2")
        elastic.wait_for_note("all ranks are asked for a backup")
        (tmp_path / "deaf").unlink()
        elastic.wait_for(1, 2)
        elastic.end()


def test_growth_waits_for_the_cool_down(tmp_path: Path) -> None:
    options = ("--host-discovery-script", discovery(tmp_path, "localhost:2"), "--cool-down", "3600")
    with job("-np", "1:3", *options, write_script(tmp_path, TRAIN), cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for(0, 2)
        say(tmp_path, "localhost:3")
        say(tmp_path, "localhost:1")  # A host that leaves cannot wait.
        elastic.wait_for(1, 1)
        assert "instead of 2: all ranks" not in elastic.end()


def test_a_failing_discovery_script_before_the_start(tmp_path: Path) -> None:
    words = ("-np", "1:2", "--host-discovery-script")
    script = write_script(tmp_path, TRAIN)
    ended = run_job(*words, discovery(tmp_path, "<html>"), script, cwd=tmp_path)
    assert ended.code == 2 and "must print hosts. Received: '<html>'" in ended.stderr
    assert not list(tmp_path.glob("up.*"))


def test_a_discovery_script_that_fails_later_changes_nothing(tmp_path: Path) -> None:
    with job(
        *("-np", "1:2", "--host-discovery-script", discovery(tmp_path, "localhost:2"), write_script(tmp_path, TRAIN)),
        cwd=tmp_path,
    ) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for(0, 2)
        (tmp_path / "hosts").unlink()
        elastic.wait_for_note("must end with exit code 0. Received: exit code 1: cat:")
        say(tmp_path, "localhost:2")
        elastic.wait_for_note("prints hosts again")
        stderr = elastic.end()
    assert "continues with" not in stderr


def test_a_job_waits_for_room(tmp_path: Path) -> None:
    script = discovery(tmp_path, "localhost:1")
    words = ("-np", "2:3", "--host-discovery-script", script, "--wait", "120", write_script(tmp_path, TRAIN))
    with job(*words, cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for_note("waits up to 120 s for room for 2 workers (now 1).")
        say(tmp_path, "localhost:2")
        elastic.wait_for(0, 2)
        elastic.end()
    ended = run_job("-np", "3:3", *words[2:4], "--wait", "0.5", words[-1], cwd=tmp_path)
    assert ended.code == 2 and "There must be room for 3 workers (MIN of -np 3:3)." in ended.stderr


HANGING = "#!/bin/sh\ntouch {folder}/asked\nsleep 600\n"


@pytest.mark.parametrize(
    "phase", ["first discovery", "waiting", "later waiting", "discovery", "asked", "restart pause"]
)
def test_ctrl_c_in_each_phase(tmp_path: Path, phase: str) -> None:
    path = discovery(tmp_path, "localhost:1")
    options = ["-np", "1:2", "--host-discovery-script", path]
    if phase == "first discovery":
        Path(path).write_text(HANGING.format(folder=tmp_path))
    elif phase == "asked":
        (tmp_path / "deaf").touch()
        options += ["--cool-down", "0.1"]
    elif phase in ("waiting", "later waiting"):
        options[1] = "2:2"
        say(tmp_path, "localhost:2" if phase == "later waiting" else "localhost:1")
    elif phase == "restart pause":
        options += ["--max-restarts", "9"]
    with job(*options, write_script(tmp_path, TRAIN), cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        if phase == "first discovery":
            running.wait_for_files(tmp_path / "asked")
        elif phase == "waiting":
            elastic.wait_for_note("waits up to 600 s for room for 2 workers")
        elif phase == "later waiting":
            elastic.wait_for(0, 2)
            say(tmp_path, "localhost:1")
            elastic.wait_for_note("waits up to 600 s for room for 2 workers")
        elif phase == "asked":
            elastic.wait_for_note("starting 1 worker")
            say(tmp_path, "localhost:2")
            elastic.wait_for_note("all ranks are asked for a backup")
        elif phase == "discovery":
            elastic.wait_for(0, 1)
            Path(path).with_suffix(".new").write_text(HANGING.format(folder=tmp_path))
            Path(path).with_suffix(".new").chmod(0o755)
            Path(path).with_suffix(".new").rename(path)
            running.wait_for_files(tmp_path / "asked")
        else:
            for attempt in range(4):  # until the pause is long
                elastic.wait_for(attempt, 1)
                elastic.kill(attempt, 0, "later")
            elastic.wait_for_note("as attempt 4 (restart 4 of 9)")
        running.process.send_signal(signal.SIGINT)
        ended = running.end()
        wait_until(lambda: running.left() == [], "the end of all processes", 10)
    assert ended.code == 130, ended.stderr


def test_a_killed_launcher_leaves_no_discovery_script(tmp_path: Path) -> None:
    path = discovery(tmp_path, "localhost:1")
    with job("-np", "1:2", "--host-discovery-script", path, write_script(tmp_path, TRAIN), cwd=tmp_path) as running:
        elastic = Elastic(running, tmp_path)
        elastic.wait_for(0, 1)
        Path(path).with_suffix(".new").write_text(HANGING.format(folder=tmp_path))
        Path(path).with_suffix(".new").chmod(0o755)
        Path(path).with_suffix(".new").rename(path)
        running.wait_for_files(tmp_path / "asked")
        running.process.kill()
        running.process.wait(timeout=DEADLINE_S)
        wait_until(lambda: running.left() == [], "the end of all processes")


def test_a_preemption_notice_ends_a_job_in_order(tmp_path: Path) -> None:
    script = """
        import os, pathlib, signal, sys, time
        def save(number, frame):
            print("saved", flush=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("up." + os.environ["TFDISTKIT_RANK"]).touch()
        while True:
            time.sleep(600)
    """
    words = ("-np", "2", "--max-restarts", "3", write_script(tmp_path, script))
    for options in (("--preemption-file", "notice"), ("--preemption-command", "test -e notice")):
        with job(*options, *words, cwd=tmp_path) as running:
            running.wait_for_files(tmp_path / "up.0", tmp_path / "up.1")
            (tmp_path / "notice").touch()
            ended = running.end()
            assert running.left() == []
        assert ended.code == 143, ended.stderr
        assert "preemption notice from" in ended.stderr and "all ranks make a backup and end" in ended.stderr
        assert sorted(ended.stdout.splitlines()) == ["[0] saved", "[1] saved"]
        for path in ("notice", "up.0", "up.1"):
            (tmp_path / path).unlink()
