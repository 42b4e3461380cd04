"""The batch script of a job: what SLURM is asked for, and what each of its tasks runs. Plain text, made of plain data.

Everything of the user's is quoted: in the `#SBATCH` lines for sbatch, which reads them by rules of its own, and below
for the shell.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tfdistkit import env
from tfdistkit.errors import OptionError, explain
from tfdistkit.report.crashes import FILE_NAME as CRASH_FILE
from tfdistkit.report.names import ProcessName
from tfdistkit.report.progress import BACKUP_FILE

# A script that ends with this has made a backup and wants to be started again (EX_TEMPFAIL of sysexits.h).
AGAIN_EXIT_CODE = 75
# It is told so by this signal, if the user wants it. One that ends by the signal, as with `BackupAndResume`, has made
# its backup too if it says so (`report.progress`); else the signal came too early, or the script knows none.
_SIGNAL = "USR1"
_KILLED_BY_IT = 128 + signal.SIGUSR1
# A rank that ended with it leaves this in the run folder; the batch script takes it away.
_AGAIN = "again"

# What a task leaves in its folder: its process, and how and when that ended; the batch script leaves its own exit code.
PID_FILE = "pid"
ENDED_FILE = "ended"
# The script itself, in the run folder.
BATCH_FILE = "batch.sh"

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")

# What each task runs: the program, with its place in the run folder. When it ends, the exit code is kept, because
# srun only tells that of the job; not when SLURM ends the whole step. The shell itself ends last: a program that does
# not end when asked is found by SLURM as its child. It has nothing to say itself.
_TASK = f"""\
task='
export {env.RANK}=$SLURM_PROCID {env.TASK_DIR}="$TASKS/rank.$SLURM_PROCID"
mkdir -p -m 700 "${env.TASK_DIR}" && cd "${env.TASK_DIR}" || exit
trap : {_SIGNAL}
trap "is_stopped=1" TERM
exec 3>&2 2> /dev/null
(exec sh -c "echo \\$\\$ > {PID_FILE} && cd \\"\\$0\\" && exec \\"\\$@\\"" "$OLDPWD" "$@" 2>&3 3>&-)
code=$?
if [ $code = {_KILLED_BY_IT} ] && [ -e {BACKUP_FILE} ]; then code={AGAIN_EXIT_CODE}; fi
if [ $code = {AGAIN_EXIT_CODE} ]; then rm -f {CRASH_FILE}; : > "${env.RUN_DIR}/{_AGAIN}" && code=0; fi
if [ -z "$is_stopped" ]; then
    echo "$code $(date +%s.%N) $(uname -n)" > .{ENDED_FILE} && mv .{ENDED_FILE} {ENDED_FILE}
fi
exit $code'
"""

# What an earlier job left in the folder is nobody's business, and what an earlier run of this one left is over.
_RUN = f"""\
rm -f "${env.RUN_DIR}/{_AGAIN}" "${env.RUN_DIR}/{ENDED_FILE}"
for left in "${env.RUN_DIR}"/rank.* "${env.RUN_DIR}"/attempt.*/rank.*; do
    rm -f "$left/{PID_FILE}" "$left/{ENDED_FILE}" "$left/{CRASH_FILE}" "$left/{BACKUP_FILE}"
done
{env.SECRET}=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')
export {env.ATTEMPT}=0 TASKS="${env.RUN_DIR}" {env.SECRET}
while :; do
    srun --kill-on-bad-exit=1 {{options}} sh -c "$task" tfdistkit {{command}}
    code=$?
    if [ $code = 0 ] || [ "${env.ATTEMPT}" -ge {{max_restarts}} ]; then break; fi
    {env.ATTEMPT}=$(({env.ATTEMPT} + 1))
    TASKS="${env.RUN_DIR}/attempt.${env.ATTEMPT}"
    wait=$(({env.ATTEMPT} < 7 ? 1 << ({env.ATTEMPT} - 1) : 60))
    again="everything starts again as attempt ${env.ATTEMPT} in $wait s"
    echo "tfdistkit: the job failed with exit code $code: $again." >&2
    sleep "$wait"
done
"""

_AGAIN_OR_END = f"""\
if [ $code = 0 ] && [ -e "${env.RUN_DIR}/{_AGAIN}" ]; then
    echo "tfdistkit: there is a backup, and more to do: job $SLURM_JOB_ID is queued again." >&2
    scontrol requeue "$SLURM_JOB_ID" && exit
    code={AGAIN_EXIT_CODE}
fi
echo $code > "${env.RUN_DIR}/{ENDED_FILE}"
exit $code
"""


@dataclass(frozen=True)
class BatchSpec:
    """A job for SLURM as the user asked for it.

    Args:
        tasks: How many processes: workers, and with parameter servers these and a coordinator.
        command: What each of them runs.
        run_dir: Where its log and the records of its processes go; all nodes must see it.
        folder: Where the job runs.
        name: What SLURM's lists call it.
        nodes: How many nodes; None leaves it to SLURM.
        tasks_per_node: How many processes on each; None leaves it to SLURM.
        ps: How many of the tasks are parameter servers.
        time: The time limit as SLURM takes it; None for the partition's own.
        partition: Its name; None for the default one.
        backup_before_s: How long before the time limit the script is told to make a backup (SIGUSR1), after which
            the job is queued again; None for not at all.
        max_restarts: How often everything is started again after a failure, in the same allocation.
        sbatch_args: More options of sbatch, one word each.
        env: Variables for the processes, over those of this process.
    """

    tasks: int
    command: tuple[str, ...]
    run_dir: Path
    folder: Path
    name: str
    nodes: int | None = None
    tasks_per_node: int | None = None
    ps: int = 0
    time: str | None = None
    partition: str | None = None
    backup_before_s: int | None = None
    max_restarts: int = 0
    sbatch_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def log_path(self) -> Path:
        """What all processes print."""
        return self.run_dir / "log"

    def process_name(self, task: int) -> ProcessName:
        """Returns what a task is called, see `cluster.slurm`: the first one coordinates, the last ones serve."""
        if not self.ps:
            return ProcessName(task)
        if task == 0:
            return ProcessName(0, "chief")
        servers_from = self.tasks - self.ps
        return ProcessName(task - 1, "worker") if task < servers_from else ProcessName(task - servers_from, "ps")


def batch_script(job: BatchSpec) -> str:
    """Writes the batch script of a job.

    Args:
        job: What the user wants.

    Returns:
        The script, which depends on nothing but what is installed on the nodes.

    Raises:
        OptionError: if something in it cannot be told to sbatch.
    """
    directives = "\n".join(f"#SBATCH {_directive(word)}" for word in _sbatch_words(job))
    options = "--label" if job.tasks > 1 else ""
    run = _RUN.format(options=options, command=shlex.join(job.command), max_restarts=job.max_restarts)
    parts = [f"#!/bin/sh\n{directives}\n", _exports(job), _TASK, run, _AGAIN_OR_END]
    return "\n".join(parts)


def _sbatch_words(job: BatchSpec) -> list[str]:
    told: dict[str, object] = {
        "job-name": job.name,
        "chdir": job.folder,
        "output": _file_name(job.log_path),
        "open-mode": "append",
        "ntasks": job.tasks,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "partition": job.partition,
        "time": job.time,
        "signal": None if job.backup_before_s is None else f"{_SIGNAL}@{job.backup_before_s}",
    }
    words = [f"--{name}={value}" for name, value in told.items() if value is not None]
    # What begins from nothing again after the failure of a node, many days later, is a surprise.
    return [*words, "--no-requeue" if job.backup_before_s is None else "--requeue", *job.sbatch_args]


def _file_name(path: Path) -> str:
    """A file as SLURM reads names of them: `%j` and the like stand for something, unless a backslash is in the name."""
    text = str(path)
    return text.replace("\\", "\\\\") if "\\" in text else text.replace("%", "%%")


def _directive(word: str) -> str:
    """One word as sbatch reads it: quotes keep blanks, and a backslash takes the next character as it is."""
    if not word.isprintable():
        raise OptionError(
            explain(
                "An option for sbatch cannot be written into a script.",
                received=repr(word),
                expected="one line of text",
            )
        )
    if _PLAIN.fullmatch(word):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def _exports(job: BatchSpec) -> str:
    variables = {
        env.UNBUFFERED: "1",
        **job.env,
        # Others that the shell holds describe another cluster.
        env.CLUSTER: "slurm",
        env.RUN_DIR: str(job.run_dir),
        **({env.PS: str(job.ps)} if job.ps else {}),
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    # Since SLURM 22.05, srun does not take it over from sbatch.
    lines.append('[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"')
    return "\n".join(lines) + "\n"
