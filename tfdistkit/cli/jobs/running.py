"""Finds the jobs of this user that run on this machine, by the event logs that their launchers hold open.

The kernel knows these (`/proc/<pid>/fd`), so there is no register of jobs that could be stale.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdistkit.report.events import FILE_NAME, read_events
from tfdistkit.report.names import ProcessName, attempt_folder

# The first event of a job's log, in the launcher and in the process that follows a job of SLURM.
_FIRST = ("job_started", "job_submitted")
_SHOWN_DIGITS = 8
# The program of `tfdistkit.launch`: see `launcher.call`.
_CALL = ["-m", "tfdistkit.launcher.call"]


@dataclass(frozen=True)
class JobProcess:
    """A process of a job.

    Args:
        name: Its name.
        folder: Its folder in the run folder.
        has_ended: Whether it has ended.
    """

    name: ProcessName
    folder: Path
    has_ended: bool = False


@dataclass(frozen=True)
class Job:
    """A job, as its event log tells.

    Args:
        run_dir: Its run folder.
        launcher: The process of its launcher; None if it has ended.
        events: The events of its log.
    """

    run_dir: Path
    launcher: int | None
    events: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        """What it is called on the command line: the first digits of its id, or the number that SLURM gave it."""
        first = self.events[0]
        return str(first.get("job_id") or first.get("job"))[:_SHOWN_DIGITS]

    @property
    def program(self) -> str:
        """The name of the script, without its arguments."""
        words = [str(word) for word in self.events[0].get("program", ())]
        if words[:2] == _CALL:
            return "tfdistkit.launch"
        return " ".join(words[:2]) if words[:1] == ["-m"] else os.path.basename("".join(words[:1]).rstrip("/"))

    @property
    def is_call(self) -> bool:
        """Whether it is a call of `tfdistkit.launch`, in a process of the user's."""
        return self.program == "tfdistkit.launch"

    @property
    def started(self) -> float:
        """When it started, in seconds since the epoch."""
        return float(self.events[0].get("time", 0.0))

    def processes(self) -> list[JobProcess]:
        """Returns its processes, those of the last attempt."""
        found: dict[ProcessName, JobProcess] = {}
        attempt, restarts = 0, dict[ProcessName, int]()
        for event in self.events:
            if event["event"] == "job_restarting":
                attempt, found, restarts = int(event["attempt"]), {}, {}
            elif event["event"] in ("worker_started", "worker_restarted", "worker_ended"):
                name = ProcessName(int(event["rank"]), event.get("role"))
                folder = attempt_folder(self.run_dir, attempt) / name.folder
                if event["event"] == "worker_restarted":
                    restarts[name] = restarts.get(name, 0) + 1
                again = restarts.get(name)
                folder = folder / f"restart.{again}" if again else folder
                found[name] = JobProcess(name, folder, event["event"] == "worker_ended")
        return list(found.values())


def running_jobs() -> list[Job]:
    """Returns the jobs of this user on this machine, the oldest first."""
    found = {}
    for pid, path in _open_logs():
        job = read_job(path.parent, pid)
        if job is not None:
            found[job.run_dir] = job
    return sorted(found.values(), key=lambda job: job.started)


def read_job(run_dir: Path, launcher: int | None = None) -> Job | None:
    """Returns the job of a run folder; None if the folder is none.

    Args:
        run_dir: The folder.
        launcher: The process of its launcher; None if it has ended.
    """
    with contextlib.suppress(OSError):
        events = read_events(run_dir)
        if events and events[0]["event"] in _FIRST:
            return Job(run_dir, launcher, tuple(events))
    return None


def _open_logs() -> Iterator[tuple[int, Path]]:
    """Yields the event logs that processes of this user write, with the process."""
    for name in _listed("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                continue
        for descriptor in _listed(f"/proc/{name}/fd"):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/{name}/fd/{descriptor}")
                if os.path.basename(path) == FILE_NAME and _is_written(name, descriptor):
                    yield int(name), Path(path)


def _is_written(pid: str, descriptor: str) -> bool:
    """Returns whether a descriptor is open for writing: others may read the log, such as `tail -f`."""
    for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines():
        if line.startswith("flags:"):
            return int(line.partition(":")[2], 8) & os.O_ACCMODE == os.O_WRONLY
    return False


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
