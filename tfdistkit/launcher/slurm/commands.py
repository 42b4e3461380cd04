"""SLURM's commands: submit a job, query its state, cancel or signal it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.errors import MissingDependencyError, UnsupportedError, explain

# Timeout for the controller of a large cluster; the commands' own timeouts are shorter.
_ANSWER_S = 120.0

# https://slurm.schedmd.com/squeue.html, "Job state codes": the final states.
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
# Not a state of SLURM: the controller forgets a job some minutes after its end (MinJobAge).
FORGOTTEN = "FORGOTTEN"


@dataclass(frozen=True)
class JobState:
    """The state of a job in SLURM's controller.

    Args:
        name: The state, such as `PENDING`, `RUNNING`, `COMPLETED`.
        reason: The reason for the state; empty if there is none.
        nodes: Its nodes, in SLURM's notation; empty while it waits.
        exit_code: The exit code of its batch script.
        signal: The signal that ended it, or 0.
    """

    name: str
    reason: str = ""
    nodes: str = ""
    exit_code: int = 0
    signal: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether the state is final."""
        return self.name in _ENDED or self.name == FORGOTTEN

    @property
    def is_good(self) -> bool:
        """Whether the job succeeded."""
        return self.name == "COMPLETED"

    def __str__(self) -> str:
        """`PENDING (Resources)`, `RUNNING on n[1-2]`."""
        place = f" on {self.nodes}" if self.nodes and not self.has_ended else ""
        return f"{self.name}{place}" + (f" ({self.reason})" if self.reason else "")


def submit(script: Path, variables: Mapping[str, str]) -> str:
    """Submits a batch script.

    Args:
        script: The script; SLURM keeps a copy.
        variables: The environment that the job inherits.

    Returns:
        The job's id.

    Raises:
        MissingDependencyError: if sbatch is not installed.
        UnsupportedError: if SLURM rejects the job; the message holds sbatch's.
    """
    ended = _run("sbatch", "--parsable", str(script), variables=variables)
    found = re.match(r"[0-9]+", ended.stdout)
    if ended.returncode or found is None:
        raise UnsupportedError(
            explain(
                "SLURM rejected the job.",
                received=f"exit code {ended.returncode} of sbatch: {(ended.stderr or ended.stdout).strip()}",
                do="Check the script with `--dry-run`, and partitions and their limits with `sinfo`.",
            )
        )
    return found[0]


def look_at_job(job: str) -> JobState | None:
    """Queries the state of a job.

    Args:
        job: The job's id.

    Returns:
        The state; None if the controller does not answer.
    """
    ended = _run("scontrol", "show", "job", "--oneliner", job)
    if "Invalid job id" in ended.stderr:
        return JobState(FORGOTTEN)
    return None if ended.returncode else parse_job(ended.stdout)


def parse_job(text: str) -> JobState | None:
    """Parses the output of `scontrol show job --oneliner`.

    Args:
        text: One line of `Name=value` words; some values contain blanks, but none of those used here.

    Returns:
        The job's state; None if the text has none.
    """
    fields: dict[str, str] = {}
    for name, value in re.findall(r"(?:^|\s)([A-Za-z:/_]+)=(\S*)", text):
        # The first of each name: later fields, such as Comment, contain the user's text.
        fields.setdefault(name, value)
    if "JobState" not in fields:
        return None
    code, _, number = fields.get("ExitCode", "").partition(":")
    nothing = ("", "None", "(null)")
    return JobState(
        name=fields["JobState"],
        reason="" if fields.get("Reason", "") in nothing else fields["Reason"],
        nodes="" if fields.get("NodeList", "") in nothing else fields["NodeList"],
        exit_code=int(code) if code.isdecimal() else 0,
        signal=int(number) if number.isdecimal() else 0,
    )


def cancel(job: str, signal: str | None = None) -> str:
    """Ends a job, or sends its processes a signal.

    Args:
        job: The job's id.
        signal: A name such as `KILL`; None sends SIGTERM, and SIGKILL after SLURM's grace period.

    Returns:
        SLURM's error message; empty without an error.
    """
    options = [] if signal is None else [f"--signal={signal}", "--full"]
    ended = _run("scancel", *options, job)
    return ended.stderr.strip() if ended.returncode else ""


def _run(*words: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise MissingDependencyError(
            explain(
                f"`{words[0]}` was not found.",
                expected="SLURM's commands on the PATH",
                do="Submit the job where SLURM is installed (a login node), or use another `--backend`.",
            )
        )
    try:
        return subprocess.run(
            words,
            env=None if variables is None else dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
            # Ctrl-C must reach only the launcher, which needs the job's id to cancel it.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {_ANSWER_S:g} s")
