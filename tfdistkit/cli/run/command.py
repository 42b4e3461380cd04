"""Implements `tfdistkit run`: runs a script in several worker processes, on this machine or on other hosts."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tfdistkit import env
from tfdistkit.cli.run.options import RunOptions, parse
from tfdistkit.cli.run.parser import make_parser as make_parser  # part of the interface of a command
from tfdistkit.cli.run.starting import hidden_lines, resumption_hint, starting_line
from tfdistkit.cli.shown import end_console, shown_value
from tfdistkit.errors import TfdistkitError
from tfdistkit.launcher.local.isolation import isolate
from tfdistkit.launcher.old_runs import remove_old_runs
from tfdistkit.launcher.output.background_sink import standard_sinks
from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.piped_script import PipedScript, read_piped
from tfdistkit.launcher.placement import HERE
from tfdistkit.launcher.preparing import Prepared
from tfdistkit.launcher.rank_variables import tf_config
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec, ProcessSpec, temporary_run_dir
from tfdistkit.report.alone import describe_alone
from tfdistkit.report.events import require_unused
from tfdistkit.report.failures import signal_name
from tfdistkit.report.secret_values import without_secrets_in
from tfdistkit.report.summary import describe_run
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.elastic.changes import Changes
from tfdistkit.supervise.result import JobResult
from tfdistkit.supervise.signals import SignalInbox
from tfdistkit.supervise.supervisor import run_job

_USAGE_EXIT_CODE = 2


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit run`.

    Returns:
        The exit code, see `tfdistkit run --help`.
    """
    options = parse(arguments)
    try:
        piped = read_piped(options.program[0]) if options.is_piped and not options.is_dry_run else None
    except TfdistkitError as error:
        return _refuse(error)
    # Installed before workers start: from here on, Ctrl-C stops them and waits.
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(SignalInbox())
        try:
            if options.is_isolated:
                isolate()
            job = job_of(options, piped)
            row = row_of(job.backend)
            if row.submit is not None:
                code: int = row.load(row.submit)(job, options, inbox.received)
                return code
            changes = stack.enter_context(contextlib.closing(Changes(job, _note)))
            job, prepared = changes.prepare(0, lambda: bool(inbox.received))
            if inbox.received:
                if prepared.backend is not None:
                    prepared.backend.close()
                return 128 + inbox.received[0]
            if options.is_dry_run:
                return _show(prepared)
            return _run(job, prepared, options, inbox.received, piped, changes)
        except TfdistkitError as error:  # raised before any process was started
            if inbox.received:
                return 128 + inbox.received[0]
            return _refuse(error)


def _note(text: str) -> None:
    """Shows a message before the workers, and their console, are there."""
    print(text, file=sys.stderr, flush=True)


def _refuse(error: TfdistkitError) -> int:
    print(f"tfdistkit run: {error}", file=sys.stderr)
    return _USAGE_EXIT_CODE


def job_of(options: RunOptions, piped: PipedScript | None) -> JobSpec:
    """Returns the job for the options.

    Args:
        options: The options of the command.
        piped: The script, if it does not come from a file.
    """
    # Other nodes see the working directory, but not this machine's folder for temporary files.
    parent = Path.cwd() if row_of(options.backend).is_submitted else Path(tempfile.gettempdir())
    run_dir = Path(os.path.abspath(options.log_dir)) if options.log_dir else temporary_run_dir(parent)
    return JobSpec(
        world_size=options.np,
        program=options.program if piped is None else piped.program(run_dir, options.program[1:]),
        run_dir=run_dir,
        env=options.env,
        threads_per_worker=options.threads_per_worker,
        timeout_s=options.timeout_s,
        passes_stdin=True,
        backend=options.backend,
        ps=options.ps,
        max_restarts=options.max_restarts,
        hosts=options.hosts,
        mpi_args=options.mpi_args,
        backend_options=options.backend_options,
        restart_window_s=options.restart_window_s,
        elastic=options.elastic,
        preemption=options.preemption,
        hang_timeout_s=options.hang_timeout_s,
    )


def _show(prepared: Prepared) -> int:
    if prepared.backend is not None:
        prepared.backend.close()
    print("\n".join([*filter(None, [prepared.report]), *map(_as_shell_line, prepared.processes)]))
    return 0


def _run(
    job: JobSpec,
    prepared: Prepared,
    options: RunOptions,
    signals: Sequence[int],
    piped: PipedScript | None,
    changes: Changes,
) -> int:
    if options.log_dir is None:
        remove_old_runs(job.run_dir.parent)
    processes = prepared.processes
    hidden = hidden_lines(options.is_verbose, options.env)
    console = Console(*standard_sinks(), [process.name.label for process in processes], hidden)
    if env.text(env.TF_CONFIG):
        is_set = row_of(options.backend).variables is tf_config
        gets = "each worker gets its own" if is_set else "the workers get none"
        console.note(f"tfdistkit: TF_CONFIG of this shell is not used: {gets}.")
    if prepared.report:
        console.note(prepared.report)
    if not options.is_quiet:
        line = starting_line(job, options.is_isolated)
        console.note("\n".join([line, *map(_as_shell_line, processes if options.is_verbose else ())]))
    if job.elastic is not None and piped is None and (hint := resumption_hint(job.program)):
        console.note(hint)
    try:
        if piped is not None:
            require_unused(job.run_dir)
            piped.write(job.run_dir)
        result = run_job(job, processes, console, signals, prepared.backend, changes)
    except TfdistkitError:
        console.finish()
        if options.log_dir is None:
            shutil.rmtree(job.run_dir, ignore_errors=True)
        raise
    _report(result, job, options, console)
    shown = end_console(console, result, job.run_dir, signals)
    keeps_folder = options.log_dir is not None or result.outcome is not Outcome.SUCCEEDED or bool(result.incidents)
    if not keeps_folder and shown.is_whole:
        shutil.rmtree(job.run_dir, ignore_errors=True)
    return shown.exit_code


def _report(result: JobResult, job: JobSpec, options: RunOptions, console: Console) -> None:
    if result.outcome is not Outcome.SUCCEEDED:
        console.note(_failure_text(result, job))
    elif result.incidents:
        report = describe_run((), incidents=result.incidents, kept=job.run_dir)
        console.note(f"tfdistkit: the job succeeded after {result.elapsed_s:.1f} s despite failures.\n{report}")
    elif options.is_verbose:
        console.note(f"tfdistkit: the job succeeded after {result.elapsed_s:.1f} s")
    if result.straggler and not options.is_quiet:
        console.note(f"tfdistkit: {result.straggler}")
    if result.worked_alone:
        console.note(f"tfdistkit: {describe_alone(len(result.folders))}")


def _failure_text(result: JobResult, job: JobSpec) -> str:
    after = f"after {result.elapsed_s:.1f} s"
    headline = {
        Outcome.FAILED: f"the job failed {after}: "
        + ("the first failure was" if result.failures else "no worker had exited,"),
        Outcome.INTERRUPTED: f"the job was ended by {signal_name(result.exit_code - 128)} {after}.",
        Outcome.TIMED_OUT: f"the job did not end within {job.timeout_s or 0:g} s (--timeout).",
    }[result.outcome]
    if result.attempt and result.outcome is Outcome.FAILED:
        headline = f"attempt {result.attempt}, the last one, failed {after}: the first failure was"
    if result.hang and not result.failures:
        headline = f"the job hung, and was stopped {after}: no rank made progress for {job.hang_timeout_s:g} s."
    report = describe_run(
        result.failures,
        suspended=result.suspended,
        stopped=result.stopped,
        left=result.left,
        incidents=result.incidents,
        hang=result.hang,
        kept=job.run_dir,
    )
    return f"tfdistkit: {headline}\n{report}"


def _as_shell_line(process: ProcessSpec) -> str:
    """Returns the command of a process for a shell, with the variables that the launcher sets."""
    variables = [f"{name}={shown_value(name, value)}" for name, value in process.env.items()]
    place = "" if process.host == HERE else f" on {process.host}"
    return f"{process.name}{place}: {' '.join(variables)} {shlex.join(without_secrets_in(process.command))}"
