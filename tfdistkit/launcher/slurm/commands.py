"""SLURM's own commands: submit a job, look at it, signal it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.errors import MissingDependencyError, UnsupportedError, explain

# The controller of a large cluster may take its time; without an answer these commands give up by themselves.
_ANSWER_S = 120.0

# https://slurm.schedmd.com/squeue.html, "Job state codes": those that a job does not leave by itself.
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
# Ours: the controller keeps a job for some minutes after its end (MinJobAge).
FORGOTTEN = "FORGOTTEN"


@dataclass(frozen=True)
class JobState:
    """A job as SLURM's controller sees it.

    Args:
        name: Such as `PENDING`, `RUNNING`, `COMPLETED`.
        reason: Why it waits, or why it ended; empty if there is none.
        nodes: Where it runs, as SLURM writes it; empty while it waits.
        exit_code: What its batch script ended with.
        signal: The signal that ended it, or 0.
    """

    name: str
    reason: str = ""
    nodes: str = ""
    exit_code: int = 0
    signal: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether it is over for good."""
        return self.name in _ENDED or self.name == FORGOTTEN

    @property
    def is_good(self) -> bool:
        """Whether it ended well."""
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
        The job's number.

    Raises:
        MissingDependencyError: if there is no sbatch here.
        UnsupportedError: if SLURM does not take the job, with what it says.
    """
    ended = _run("sbatch", "--parsable", str(script), variables=variables)
    found = re.match(r"[0-9]+", ended.stdout)
    if ended.returncode or found is None:
        raise UnsupportedError(
            explain(
                "SLURM did not take the job.",
                received=f"exit code {ended.returncode} of sbatch",
                do=f"It said:\n{(ended.stderr or ended.stdout).strip()}\n"
                "`--dry-run` shows the script that it was given; `sinfo` shows partitions and their limits.",
            )
        )
    return found[0]


def look_at_job(job: str) -> JobState | None:
    """Asks the controller for a job.

    Args:
        job: Its number.

    Returns:
        What it knows; None when it does not answer.
    """
    ended = _run("scontrol", "show", "job", "--oneliner", job)
    if "Invalid job id" in ended.stderr:
        return JobState(FORGOTTEN)
    return None if ended.returncode else parse_job(ended.stdout)


def parse_job(text: str) -> JobState | None:
    """Reads what `scontrol show job --oneliner` prints.

    Args:
        text: One line of `Name=value` words; some values hold blanks, those that count here do not.

    Returns:
        The job's state; None if there is none in it.
    """
    fields: dict[str, str] = {}
    for name, value in re.findall(r"(?:^|\s)([A-Za-z:/_]+)=(\S*)", text):
        # The first of a name: what comes late, such as Comment, is the user's.
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
        job: Its number.
        signal: A name such as `KILL`; None asks all processes to end, and kills them after SLURM's own time of grace.

    Returns:
        What SLURM complains; empty if nothing.
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
                do="Submit the job where SLURM is installed (a login node), or take another `--backend`.",
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
            # Ctrl-C is for the launcher, which then cancels the job; it needs to know its number.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {_ANSWER_S:g} s")
