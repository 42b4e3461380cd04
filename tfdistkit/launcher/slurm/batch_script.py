"""Generate the batch script of a SLURM job: its `#SBATCH` options, and the command of each task.

All user input is quoted: in the `#SBATCH` lines by sbatch's own rules, elsewhere for the shell.
"""

from __future__ import annotations

import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

from tfdistkit import env
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.report.crashes import FILE_NAME as CRASH_FILE
from tfdistkit.report.names import ProcessName
from tfdistkit.report.progress import BACKUP_FILE

# The exit code of a script that made a backup and asks to be restarted (EX_TEMPFAIL of sysexits.h).
AGAIN_EXIT_CODE = 75
# The signal that asks for a backup. A script that dies of it, as with `BackupAndResume`, made its backup if it wrote
# the file of `report.progress`; else the signal came too early, or the script makes no backups.
_SIGNAL = "USR1"
_KILLED_BY_IT = 128 + signal.SIGUSR1
# A rank that asks to be restarted creates this file in the run folder; the batch script removes it.
_AGAIN = "again"

# Files in a task's folder: its process id; its exit code, time and host. The batch script writes its own exit code.
PID_FILE = "pid"
ENDED_FILE = "ended"
# The script itself, in the run folder.
BATCH_FILE = "batch.sh"

_CPUS_PER_TASK = re.compile(r"(?:--cpus-per-task=|-c ?)(\d+)", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")

# Each task runs the program in its own folder, and records its exit code, because srun only reports that of the job;
# not when SLURM ends the whole step. The shell exits last, so that SLURM finds a stuck program as its child. The shell
# itself prints nothing.
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

# Removes the records of an earlier job in the folder, and of an earlier run of this job. It waits before it says that
# it starts again: SLURM ends the tasks of a cancelled job a little before the batch script.
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
    sleep 1
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
class SlurmOptions:
    """What SLURM is asked for, beside the job itself.

    Args:
        nodes: The number of nodes, or the most of a range; None for SLURM's choice.
        least_nodes: The fewest nodes of a range: the job starts, and starts again, on as many as are free; None for a
            fixed number.
        workers_per_node: The number of workers on each node; None for SLURM's choice.
        time: The time limit in SLURM's notation; None for the partition's default.
        partition: The partition; None for the default partition.
        backup_before_s: The time before the time limit, in seconds, at which the script is asked for a backup
            (SIGUSR1), after which the job is requeued; None for never.
        sbatch_args: Extra options of sbatch, one word each.
        is_detached: Whether the job is submitted only, and not followed.
    """

    nodes: int | None = None
    least_nodes: int | None = None
    workers_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    backup_before_s: int | None = None
    sbatch_args: tuple[str, ...] = ()
    is_detached: bool = False


@dataclass(frozen=True)
class BatchJob:
    """A job as SLURM gets it.

    Args:
        spec: The job. Its run folder must be on a file system that all nodes share.
        options: What SLURM is asked for.
        folder: The working directory.
        python: The interpreter, on all nodes.
    """

    spec: JobSpec
    options: SlurmOptions
    folder: Path
    python: str

    @property
    def run_dir(self) -> Path:
        """The folder for its log and records."""
        return self.spec.run_dir

    @property
    def tasks(self) -> int:
        """The number of processes, the most of a range: workers, with parameter servers these and a coordinator."""
        return self.spec.size

    @property
    def command(self) -> tuple[str, ...]:
        """The command of each process."""
        return (self.python, "-m", "tfdistkit.worker", *self.spec.program)

    @property
    def name(self) -> str:
        """The job's name in SLURM: that of the script or the module."""
        program = self.spec.program
        return program[1].rpartition(".")[2] if program[0] == "-m" else Path(program[0]).stem

    @property
    def env(self) -> dict[str, str]:
        """Variables for the processes; they override those of this process."""
        threads = self.spec.threads_per_worker
        names = (env.INTRA_OP_THREADS, env.INTER_OP_THREADS, env.OMP_THREADS)
        return {**(dict.fromkeys(names, str(threads)) if threads else {}), **self.spec.env}

    @property
    def bounds(self) -> str | None:
        """The fewest and the most workers, as `2:4`; None where their number is fixed."""
        least, each = self.options.least_nodes, self.options.workers_per_node
        return None if least is None or each is None else f"{least * each}:{self.tasks}"

    @property
    def log_path(self) -> Path:
        """The file with the output of all processes."""
        return self.run_dir / "log"

    def process_name(self, task: int) -> ProcessName:
        """Returns the name of a task: with servers, the first is the chief and the last are the servers."""
        if not self.spec.ps:
            return ProcessName(task)
        if task == 0:
            return ProcessName(0, "chief")
        servers_from = self.tasks - self.spec.ps
        return ProcessName(task - 1, "worker") if task < servers_from else ProcessName(task - servers_from, "ps")


def batch_script(job: BatchJob) -> str:
    """Writes the batch script of a job.

    Args:
        job: The job.

    Returns:
        The script; it only needs the software on the nodes.

    Raises:
        OptionError: if sbatch cannot read one of the options.
    """
    directives = "\n".join(f"#SBATCH {_directive(word)}" for word in _sbatch_words(job))
    options = "--label" if job.tasks > 1 else ""
    if job.bounds is not None:
        nodes, each = "$SLURM_JOB_NUM_NODES", job.options.workers_per_node
        options += f' --nodes="{nodes}" --ntasks="$(({nodes} * {each}))" --ntasks-per-node={each}'
    run = _RUN.format(options=options, command=shlex.join(job.command), max_restarts=job.spec.max_restarts)
    parts = [f"#!/bin/sh\n{directives}\n", _exports(job), _TASK, run, _AGAIN_OR_END]
    return "\n".join(parts)


def _sbatch_words(job: BatchJob) -> list[str]:
    wanted, ps = job.options, job.spec.ps
    options: dict[str, object] = {
        "job-name": job.name,
        "chdir": job.folder,
        "output": _file_name(job.log_path),
        "open-mode": "append",
        "ntasks": job.tasks if wanted.least_nodes is None else None,
        "nodes": wanted.nodes or (1 if wanted.workers_per_node else None),
        "ntasks-per-node": None if ps else wanted.workers_per_node,  # SLURM places the servers.
        "partition": wanted.partition,
        "time": wanted.time,
        "signal": None if wanted.backup_before_s is None else f"{_SIGNAL}@{wanted.backup_before_s}",
    }
    if wanted.least_nodes is not None and wanted.workers_per_node is not None:
        options["nodes"] = f"{wanted.least_nodes}-{wanted.nodes}"
        # With a number of tasks SLURM never takes more nodes than that of the fewest nodes.
        del options["ntasks-per-node"]
        options["mincpus"] = wanted.workers_per_node * _cpus_per_task(wanted.sbatch_args)
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    # Without backups, a requeue after a node failure would repeat the whole job, possibly days later.
    has_backups = wanted.backup_before_s is not None or wanted.least_nodes is not None
    return [*words, "--requeue" if has_backups else "--no-requeue", *wanted.sbatch_args]


def _cpus_per_task(sbatch_args: tuple[str, ...]) -> int:
    found = [_CPUS_PER_TASK.fullmatch(word) for word in sbatch_args]
    return next((int(one[1]) for one in reversed(found) if one is not None), 1)


def _file_name(path: Path) -> str:
    """Escapes a file name for SLURM, which replaces `%j` and the like unless the name contains a backslash."""
    text = str(path)
    return text.replace("\\", "\\\\") if "\\" in text else text.replace("%", "%%")


def _directive(word: str) -> str:
    """Quotes one word for sbatch: quotes preserve blanks, a backslash escapes the next character."""
    if not word.isprintable():
        raise OptionError(explain("An option for sbatch must be one line of printable text.", received=repr(word)))
    if _PLAIN.fullmatch(word):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def _exports(job: BatchJob) -> str:
    variables = {
        env.UNBUFFERED: "1",
        **job.env,
        # Overrides the shell's, which describes another cluster.
        env.CLUSTER: "slurm",
        env.RUN_DIR: str(job.run_dir),
        **({env.PS: str(job.spec.ps)} if job.spec.ps else {}),
        **({env.ELASTIC: job.bounds} if job.bounds else {}),
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    # Since SLURM 22.05, srun does not inherit it from sbatch.
    lines.append('[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"')
    return "\n".join(lines) + "\n"
