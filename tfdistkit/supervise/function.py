"""`tfdistkit.launch`: the launcher for notebooks and for functions."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from tfdistkit.errors import OptionError, WorkerFailedError, explain
from tfdistkit.launcher.call import read_result, remove_results, write_call
from tfdistkit.launcher.local.silent_folders import silent_folder
from tfdistkit.launcher.old_runs import remove_old_runs
from tfdistkit.launcher.output.background_sink import text_sinks
from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.output.sinks import open_descriptors
from tfdistkit.launcher.planning import plan_job
from tfdistkit.launcher.spec import HANG_TIMEOUT_S, JobSpec, temporary_run_dir
from tfdistkit.report.events import require_unused
from tfdistkit.report.names import ProcessName
from tfdistkit.report.startup_lines import StartupLines, are_wanted
from tfdistkit.report.summary import describe_run
from tfdistkit.supervise.call_arguments import check_call, require_fixed
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.result import JobResult
from tfdistkit.supervise.signals import SignalInbox
from tfdistkit.supervise.supervisor import run_job

if TYPE_CHECKING:  # `typing` has these names from Python 3.11 on; type checkers ship typing_extensions
    from typing_extensions import TypeVarTuple, Unpack

    Arguments = TypeVarTuple("Arguments")

Result = TypeVar("Result")


class LaunchOptions(TypedDict, total=False):
    """The options of `launch` that do not change what it returns."""

    env: Mapping[str, str] | None
    timeout_s: float | None
    log_dir: str | Path | None
    threads_per_worker: int | None
    backend: Literal["local", "horovod", "mpi"]
    max_restarts: int
    hang_timeout_s: float | None


# For type checkers: one result per rank, or with parameter servers the coordinator's result. A tuple of arguments,
# also an empty one, is checked against the function's signature; lists and keyword arguments cannot be.
@overload
def launch(
    fn: Callable[[], Result],
    args: tuple[()] = (),
    np: int = 2,
    *,
    kwargs: None = None,
    ps: Literal[0] = 0,
    **options: Unpack[LaunchOptions],
) -> list[Result]: ...


@overload
def launch(
    fn: Callable[..., Result],
    args: list[Any],
    np: int = 2,
    *,
    kwargs: None = None,
    ps: Literal[0] = 0,
    **options: Unpack[LaunchOptions],
) -> list[Result]: ...


@overload
def launch(
    fn: Callable[[Unpack[Arguments]], Result],
    args: tuple[Unpack[Arguments]],
    np: int = 2,
    *,
    kwargs: None = None,
    ps: Literal[0] = 0,
    **options: Unpack[LaunchOptions],
) -> list[Result]: ...


@overload
def launch(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    np: int = 2,
    *,
    kwargs: Mapping[str, Any],
    ps: Literal[0] = 0,
    **options: Unpack[LaunchOptions],
) -> list[Result]: ...


@overload
def launch(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    np: int = 2,
    *,
    kwargs: Mapping[str, Any] | None = None,
    ps: int,
    **options: Unpack[LaunchOptions],
) -> Result: ...


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    np: int = 2,
    *,
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    log_dir: str | Path | None = None,
    threads_per_worker: int | None = None,
    backend: str = "local",
    ps: int = 0,
    max_restarts: int = 0,
    hang_timeout_s: float | None = HANG_TIMEOUT_S,
) -> Any:
    """Calls a function in several worker processes on this machine, as `tfdistkit run` runs a script.

    The workers are new processes, so this process may have loaded TensorFlow. The function and its arguments are
    pickled by value, so functions defined in a notebook work. The workers' output is shown as it arrives.

    Args:
        fn: The function that each worker calls. It gets its rank from `tfdistkit.rank()` and creates its own
            strategy.
        args: Its positional arguments, the same for all workers.
        np: The number of workers.
        kwargs: Its keyword arguments.
        env: Variables for the workers; they override those of this process.
        timeout_s: Time limit of the whole job, in seconds; None for no limit.
        log_dir: The folder for the logs; None for a temporary folder that is removed after a success.
        threads_per_worker: Threads per TensorFlow operation; None divides the cores among the workers.
        backend: `"local"`, `"horovod"` or `"mpi"`, as `--backend` of `tfdistkit run`.
        ps: The number of parameter servers. If positive, a coordinator is started too, and
            `tfdistkit.strategy("parameter_server")` does not return in workers and servers.
        max_restarts: The number of restarts allowed after failures, as `--max-restarts`.
        hang_timeout_s: Time after which workers that make no progress are stopped, in seconds, as `--hang-timeout`; a
            single worker is never stopped. None for no limit.

    Returns:
        The function's results as a list in rank order; with parameter servers, its result on the coordinator.

    Raises:
        OptionError: if an argument is invalid, or cannot be pickled.
        WorkerFailedError: if a worker failed, with its traceback in the message and the
            `tfdistkit.report.Failure` in `failure`; or if the timeout expired.
        KeyboardInterrupt: after Ctrl-C, once all workers have ended.

    Example:
        ```python
        def train(learning_rate):
            with tfdistkit.strategy("multiworker").scope():
                ...
            return history.history["loss"]

        losses = tfdistkit.launch(train, args=(0.1,), np=2)
        ```
    """
    check_call(fn, args, kwargs)
    require_fixed(np)
    if problem := silent_folder({"The working directory": ".", "`log_dir`": log_dir}):
        raise OptionError(problem)
    run_dir = Path(log_dir).absolute() if log_dir is not None else temporary_run_dir(Path(tempfile.gettempdir()))
    require_unused(run_dir)
    open_descriptors()
    # Validates the options before anything is written.
    job = JobSpec(
        np,
        (),
        run_dir,
        dict(env or {}),
        threads_per_worker,
        timeout_s,
        backend=backend,
        ps=ps,
        max_restarts=max_restarts,
        hang_timeout_s=hang_timeout_s if np + ps > 1 else None,
    )
    if log_dir is None:
        remove_old_runs(run_dir.parent)
    job = replace(job, program=write_call(run_dir, fn, args, kwargs or {}))
    remove_results(run_dir)
    processes = plan_job(job)
    labels = [process.name.label for process in processes]
    hidden: dict[str, Callable[[], StartupLines]] = {} if are_wanted(job.env) else {"stderr": StartupLines}
    console = Console(*text_sinks(sys.stdout, sys.stderr), labels, hidden)
    is_shown = False
    # As under `tfdistkit run`: the first Ctrl-C stops the workers, the second kills them.
    with SignalInbox((signal.SIGINT,)) as inbox:
        try:
            result = run_job(job, processes, console, inbox.received)
            if result.outcome is Outcome.SUCCEEDED:  # blocks on a slow reader as `print` would, until Ctrl-C
                received = len(inbox.received)
                is_shown = console.finish(math.inf, lambda: len(inbox.received) > received)
            if console.problem:
                console.note(f"tfdistkit: the output could not be written ({console.problem}). It is in {run_dir}.")
        finally:
            console.finish()
    if result.outcome is Outcome.INTERRUPTED or (result.outcome is Outcome.SUCCEEDED and not is_shown):
        raise KeyboardInterrupt
    if result.outcome is not Outcome.SUCCEEDED:
        raise _failed(result, job)
    values = [
        _value(process.name, folder)
        for process, folder in zip(processes, result.folders, strict=True)
        if process.name.role in (None, "chief")
    ]
    if log_dir is None and not console.problem:
        shutil.rmtree(run_dir, ignore_errors=True)
    return values[0] if ps else values


def _value(name: ProcessName, folder: Path) -> Any:
    try:
        return read_result(folder)
    except Exception as error:  # unpickling raises whatever the objects raise
        process = str(name)
        raise WorkerFailedError(
            explain(
                f"{process[0].upper()}{process[1:]} succeeded, but its result cannot be read.",
                received=f"{type(error).__name__}: {error}",
                expected="a function that returns, and a result that this process can unpickle",
                do=f"Read its logs in {folder}.",
            )
        ) from error


def _failed(result: JobResult, job: JobSpec) -> WorkerFailedError:
    message = describe_run(
        result.failures,
        suspended=result.suspended,
        stopped=result.stopped,
        left=result.left,
        incidents=result.incidents,
        hang=result.hang,
        kept=job.run_dir,
    )
    if result.outcome is Outcome.TIMED_OUT:
        message = f"The workers did not end within {job.timeout_s:g} seconds (`timeout_s`).\n{message}"
    elif result.hang and not result.failures:
        message = (
            f"The workers hung: none made progress for {job.hang_timeout_s:g} seconds (`hang_timeout_s`).\n{message}"
        )
    return WorkerFailedError(message, result.failures[0] if result.failures else None)
