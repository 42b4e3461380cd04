"""Implements `tfdistkit stacks`: shows where the ranks of a job are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tfdistkit.cli.jobs.choice import NO_JOB_EXIT_CODE, add_ranks_option, choose_job, for_a_reader, make_job_parser
from tfdistkit.cli.jobs.running import Job, JobProcess
from tfdistkit.errors import OptionError, explain
from tfdistkit.report.hangs.layout import SPIED_STACKS
from tfdistkit.supervise.hangs.diagnosis import describe_places
from tfdistkit.supervise.hangs.missing_calls import missing_calls
from tfdistkit.supervise.hangs.requests import Answer, ask_for_stacks

_DESCRIPTION = """\
Shows where the ranks of a job are, and their stacks: for a job that seems to hang. The job goes on."""

_EPILOG = """\
examples:
  tfdistkit stacks                          all ranks of the only job
  tfdistkit stacks -r 1 --all-threads 1f6b0c2a

exit codes:
  0 the ranks answered; 1 there is no such job, or none answered"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit stacks`.

    Returns:
        The exit code.
    """
    options = make_parser().parse_args(list(arguments))
    try:
        job = choose_job(options.job)
        processes = [one for one in select_processes(job, options.rank) if not one.has_ended]
    except OptionError as error:
        print(f"tfdistkit stacks: {error}", file=sys.stderr)
        return NO_JOB_EXIT_CODE
    if not processes:
        print(f"tfdistkit stacks: no process of {job.name} runs now: it starts, restarts or waits.", file=sys.stderr)
        return NO_JOB_EXIT_CODE
    folders = [one.folder for one in processes]
    answers = ask_for_stacks(folders)
    with for_a_reader():
        print(describe_places([one.name for one in processes], answers, missing_calls(folders, answers)))
        for process, answer in zip(processes, answers):
            print(f"\n{process.name}:\n{_stack(answer, options.all_threads)}")
    return 0 if any(answer.threads for answer in answers) else NO_JOB_EXIT_CODE


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command."""
    parser = make_job_parser("stacks", _DESCRIPTION, _EPILOG)
    add_ranks_option(parser, "show this rank, or `chief`, `ps.0`, `worker.1` with --ps; can be given several times")
    parser.add_argument("--all-threads", action="store_true", help="show all threads (default: the main thread)")
    return parser


def select_processes(job: Job, ranks: Sequence[str]) -> list[JobProcess]:
    """Returns the processes of a job, or those that are selected.

    Args:
        job: The job.
        ranks: Their names as in the option `--rank`; none for all.

    Raises:
        OptionError: if the job has no such process.
    """
    processes = job.processes()
    known = {name: one for one in processes for name in (one.name.label, one.name.folder)}
    for rank in ranks:
        if rank not in known:
            expected = ", ".join(one.name.label for one in processes) or "none yet"
            raise OptionError(explain("--rank must be a rank of the job.", received=rank, expected=expected))
    return [known[rank] for rank in ranks] if ranks else processes


def _stack(answer: Answer, has_all: bool) -> str:
    if not answer.threads:
        reason = answer.no_stack or ("it did not answer" if answer.state else "it is not on this machine, or has ended")
        return f"  No stack: {reason}."
    if has_all:
        return answer.text.rstrip()
    main = [one for one in answer.threads if answer.notes is not None and one.ident == answer.notes.main_thread]
    frames = (main or answer.threads)[-1].frames
    begin = [f"  {SPIED_STACKS}"] if answer.is_spied else []
    return "\n".join(begin + [f'  File "{one.file}", line {one.line} in {one.function}' for one in frames])
