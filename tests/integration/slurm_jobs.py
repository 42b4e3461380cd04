"""`tfdistkit run --backend slurm` as a user starts it on the login host, with a look at what it leaves on any node."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_cluster import SlurmCluster, wait_until


@dataclass
class Run:
    """A running `tfdistkit run --backend slurm`; the processes of its job carry a mark."""

    slurm: SlurmCluster
    mark: str
    process: subprocess.Popen[bytes]
    log: Path
    folder: Path

    @property
    def told(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def number(self) -> str:
        """SLURM's number of the job."""
        wait_until(lambda: "was submitted" in self.told, f"a job: {self.told}")
        return re.findall(r"job (\d+) was submitted", self.told)[0]

    def wait_for(self, text: str, deadline_s: float = 60) -> None:
        """Waits until the job has printed something."""
        wait_until(lambda: text in self.told or self.process.poll() is not None, f"{text!r}", deadline_s)
        assert text in self.told, self.told

    def end(self, deadline_s: float = 90) -> int:
        """Waits for the end of the launcher; then nothing of the job is left on any node."""
        code = self.process.wait(timeout=deadline_s)
        # SLURM tells the end of a job before it has collected its last process.
        wait_until(lambda: self.left() == [], "the end of all processes of the job", deadline_s=15)
        return code

    def left(self) -> list[tuple[str, int]]:
        return [(host.name, pid) for host in self.slurm.hosts for pid in host.pids_with(self.mark)]


@contextlib.contextmanager
def started(slurm: SlurmCluster, folder: Path, script: str, *options: str, nodes: str | None = "n1,n2",
            arguments: tuple[str, ...] = (), **variables: str) -> Iterator[Run]:  # fmt: skip
    """Starts `tfdistkit run --backend slurm` in a folder; at the end nothing of it is left."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    mark = f"TEST_MARK={uuid.uuid4().hex}"
    place = [] if nodes is None else [f"--sbatch-arg=--nodelist={nodes}"]
    words = [sys.executable, "-m", "tfdistkit", "run", "--backend", "slurm", *place, *options, "train.py", *arguments]
    log = folder / "launcher.log"
    process = slurm.start(*words, cwd=folder, log=log, **dict([mark.split("=")]), **variables)
    run = Run(slurm, mark, process, log, folder)
    try:
        yield run
    finally:
        process.kill()
        process.wait(timeout=60)
        for number in re.findall(r"job (\d+) was submitted", run.told):
            slurm.run("scancel", "--signal=KILL", "--full", number)
        wait_until(lambda: run.left() == [], "the end of all processes of the job")
