"""Random cut links, power cuts, kills and stops of a training on two hosts: it always comes to its end.

Each seed is a job with three faults at random moments, also while the workers start. `-m thorough` runs 11 more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from net_hosts import LOGIN, NetHosts
from patience import longer
from random_faults import DEADLINE_S, FAULTS, TRAIN, VARIABLES, Chaos, in_folder, result
from ssh_jobs import PATHS, SshJob, command_line, ssh_job, wait_until

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]

# After so many seconds of silence a host counts as lost; so much later those on it end by themselves.
SILENCE_S = 10


class ChaosOnHosts(Chaos):
    """What happens to a job on two hosts, which have one disk for the backup."""

    def __init__(self, hosts: NetHosts, folder: Path, seed: int):
        super().__init__(folder, seed)
        self.hosts = hosts
        self.quiet: set[tuple[int, str]] = set()
        (folder / "train.py").write_text(in_folder(folder, TRAIN))
        self.discovery = folder / "hosts.sh"
        self.discovery.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        self.discovery.chmod(0o755)
        self._say("h1:2", "h2:1")
        self.start()

    @property
    def faults(self) -> list[Callable[[], None]]:
        return [self.cut, self.cut, self.switch_off, self.kill, self.suspend, self.resize, self.stop_and_start]

    def start(self) -> None:
        words = ("-np", "1:3", "--host-discovery-script", str(self.discovery), "--cool-down", "0.5")
        words += ("--threads-per-worker", "1", "--max-restarts", "20", "--wait", "240", "-x", f"PYTHONPATH={PATHS}")
        words += tuple(word for name, value in VARIABLES.items() for word in ("-x", f"{name}={value}"))
        self.job = SshJob(self.hosts, *words, str(self.folder / "train.py"), "multiworker", str(self.run))

    def _say(self, *hosts: str) -> None:
        self.listed = hosts
        (self.folder / "hosts.new").write_text("\n".join(hosts))
        (self.folder / "hosts.new").rename(self.folder / "hosts")

    def _now_quiet(self, number: int) -> None:
        self.quiet.add((self.run, self.hosts.name(number)))

    def cut(self) -> None:
        """Cuts a host off the network for some time, shorter or longer than the launcher waits for it."""
        number, seconds = self.random.choice(self.hosts.numbers), self.random.choice([3.0, 14.0, 30.0])
        self.done[-1] += f": h{number} for {seconds} s"
        self._now_quiet(number)
        self.hosts.pull_cable(number)
        time.sleep(seconds)
        self.hosts.plug_cable(number)

    def switch_off(self) -> None:
        """Switches a host off, and on again later."""
        number = self.random.choice(self.hosts.numbers)
        self.done[-1] += f": h{number}"
        self._now_quiet(number)
        self.hosts.kill(number)
        time.sleep(self.random.uniform(1, 15))
        self.hosts.start(number)

    def workers(self) -> list[int]:
        found: list[int] = []

        def are_there() -> bool:
            pids = [pid for number in self.hosts.numbers for pid in self.hosts.pids(number)]
            found.extend(pid for pid in pids if "tfdistkit.worker" in command_line(pid))
            return bool(found) or self.job.process.poll() is not None

        wait_until(are_there, "a worker", DEADLINE_S)
        return sorted(found)

    def resize(self) -> None:
        """Lets a host come or go."""
        lists = [("h1:2", "h2:1"), ("h1:1", "h2:1"), ("h2:1",), ("h1:2",)]
        self._say(*self.random.choice([one for one in lists if one != self.listed]))

    def require_nothing_left(self) -> None:
        # Who is cut off hears nothing of the end. Files are not looked at: who is killed leaves them.
        numbers = (LOGIN, *self.hosts.numbers)
        left = lambda: {pid: command_line(pid) for number in numbers for pid in self.hosts.pids(number)}  # noqa: E731
        wait_until(
            lambda: not left(),
            f"the end of all processes, after {self.done}",
            longer(3 * SILENCE_S),
            told=lambda: f"{left()}",
        )

    def has_lost_output(self, rank: tuple[int, int, int]) -> bool:
        run, attempt, number = rank
        host = (self.folder / f"host.{run:02}.{attempt:02}.{number}").read_text()
        return (run, host) in self.quiet


@pytest.fixture(scope="module")
def undisturbed(hosts: NetHosts, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Returns what one worker comes to, that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "calm").touch()
    (folder / "train.py").write_text(in_folder(folder, TRAIN))
    with ssh_job(hosts, "-np", "1", str(folder / "train.py"), "multiworker", "0", **VARIABLES) as running:
        ended = running.end(DEADLINE_S)
        assert ended.code == 0, ended.stderr
    return result(folder)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 12))])
def test_it_comes_to_the_end_that_it_has_without_faults(
    undisturbed: list[Any], whole: NetHosts, tmp_path: Path, seed: int
) -> None:
    chaos = ChaosOnHosts(whole, tmp_path, seed)
    try:
        for _ in range(FAULTS):
            chaos.happen()
        (tmp_path / "calm").touch()
        chaos.finish((0,))
    finally:
        chaos.job.sweep()
    chaos.require_the_end_of(undisturbed)
