"""Implements `tfdistkit run --backend slurm`: runs a script in a job of SLURM."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdistkit import env
from tfdistkit.cli.run.options import RunOptions
from tfdistkit.cli.run.starting import hidden_lines
from tfdistkit.cli.shown import end_console, without_secrets
from tfdistkit.cluster.environments import horovod, slurm
from tfdistkit.errors import TfdistkitError
from tfdistkit.launcher.output.background_sink import standard_sinks
from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.slurm.batch_script import BatchJob, SlurmOptions, batch_script
from tfdistkit.launcher.slurm.commands import JobState
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.report.alone import all_worked_alone, describe_alone
from tfdistkit.report.failures import signal_name
from tfdistkit.report.summary import describe_run
from tfdistkit.supervise.batch_job import follow_batch_job, submit_batch_job
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.result import JobResult

# Variables that this shell may have from another cluster.
_NOT_INHERITED = (env.TF_CONFIG, *env.LETTERBOX, *horovod.VARIABLES)
# In a job, these variables describe that job; outside, they are the user's options for srun.
_OF_A_JOB = ("SLURM_", "SLURMD_")
_CONFIGURATION = "SLURM_CONF"


def run_in_slurm(spec: JobSpec, options: RunOptions, signals: Sequence[int]) -> int:
    """Submits the job and follows it until it ends.

    Args:
        spec: The job.
        options: The options of the command.
        signals: The signals that this process received; it grows.

    Returns:
        The exit code, see `tfdistkit run --help`.

    Raises:
        TfdistkitError: if the job was not submitted.
    """
    job = BatchJob(spec, options.slurm or SlurmOptions(), folder=Path.cwd(), python=sys.executable)
    script = batch_script(job)
    if options.is_dry_run:
        print(without_secrets(script, job.env, job.command), end="")
        return 0
    hidden = hidden_lines(options.is_verbose, options.env, "stdout", has_labels=True)
    console = Console(*standard_sinks(), ["job"], hidden)
    if options.is_verbose:
        console.note(without_secrets(script, job.env, job.command))
    try:
        number = submit_batch_job(job, script, inherited_variables())
    except TfdistkitError:
        console.finish()
        if options.log_dir is None:
            shutil.rmtree(job.run_dir, ignore_errors=True)
        raise
    if job.options.is_detached:
        console.note(f"tfdistkit: job {number} was submitted. Its log: {job.log_path}")
        console.finish()
        print(number)
        return 0
    console.note(f"tfdistkit: job {number} was submitted; Ctrl-C cancels it.")
    result, state = follow_batch_job(number, job, console, signals)
    if result.outcome is not Outcome.SUCCEEDED:
        console.note(_failure_text(number, result, state, job))
    elif all_worked_alone(job.run_dir.glob("rank.*")):
        console.note(f"tfdistkit: {describe_alone(job.tasks)}")
    shown = end_console(console, result, job.run_dir, signals)
    if options.log_dir is None and result.outcome is Outcome.SUCCEEDED and shown.is_whole:
        shutil.rmtree(job.run_dir, ignore_errors=True)
    return shown.exit_code


def inherited_variables() -> dict[str, str]:
    """Returns the variables that the job inherits: none of another cluster or of an enclosing SLURM job."""
    is_nested = slurm.in_job_without_step() is not None or slurm.is_step()
    names = [name for name in env.child_env({}) if is_nested and name.startswith(_OF_A_JOB) and name != _CONFIGURATION]
    return env.child_env(dict.fromkeys([*_NOT_INHERITED, *names]))


def _failure_text(number: str, result: JobResult, state: JobState, job: BatchJob) -> str:
    after = f"after {result.elapsed_s:.1f} s"
    limit = f" of {job.options.time}" if job.options.time else ""
    headline = {
        Outcome.FAILED: f"job {number} failed {after}{_said(state)}"
        + (": the first failure was" if result.failures else f", with exit code {result.exit_code}."),
        Outcome.INTERRUPTED: f"job {number} was ended by {signal_name(result.exit_code - 128)} {after}.",
        Outcome.TIMED_OUT: f"job {number} reached its time limit{limit} (--time).",
    }[result.outcome]
    report = describe_run(result.failures, stopped=result.stopped if result.failures else (), kept=job.run_dir)
    return f"tfdistkit: {headline}\n{report}"


def _said(state: JobState) -> str:
    """Returns SLURM's own reason, such as the failure of a node or a lack of memory."""
    return "" if state.name == "FAILED" else f", SLURM says {state}"
