"""A function call as a program: written to a file by `tfdistkit.launch`, run by each worker, its result read back.

Everything goes by cloudpickle, by value where a plain pickle would need the importing module: a function that was
defined in a notebook works.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from tfdistkit import env
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.spec import left_in
from tfdistkit.report.private_files import make_folder, write_file

_CALL = "call.pkl"
_RESULT = "result.pkl"


def write_call(
    run_dir: Path, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Writes a function call to the run folder.

    Args:
        run_dir: The run folder.
        fn: What each worker calls.
        args: Its arguments.
        kwargs: Its named arguments.

    Returns:
        The program for `JobSpec.program`.

    Raises:
        OptionError: if something in it cannot be pickled.
    """
    try:
        call = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:  # pickling raises whatever the objects raise
        raise OptionError(
            explain(
                "`fn` and its arguments cannot be sent to the workers.",
                received=f"{_name(fn)}; pickling it says: {type(error).__name__}: {error}",
                expected="objects that cloudpickle can pickle",
                do="Open files, make locks, models and datasets inside the function.",
            )
        ) from error
    make_folder(run_dir)
    # The path first, and apart: unpickling the call may import modules that are found on it.
    write_file(run_dir / _CALL, pickle.dumps((sys.path, call)))
    return ("-m", __name__, str(run_dir / _CALL))


def read_result(folder: Path) -> Any:
    """Returns what the call returned on one worker.

    Args:
        folder: The worker's own folder.

    Raises:
        FileNotFoundError: if the worker left no result.
    """
    return pickle.loads((folder / _RESULT).read_bytes())  # noqa: S301


def remove_results(run_dir: Path) -> None:
    """Removes the results of an earlier run from a run folder."""
    for stale in left_in(run_dir, _RESULT):
        stale.unlink()


def main() -> None:
    """Runs in the worker: calls the function in the file named on the command line, and leaves its result."""
    path, call = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301
    sys.path[:] = path
    fn, args, kwargs = pickle.loads(call)  # noqa: S301
    result = fn(*args, **kwargs)
    try:
        data = cloudpickle.dumps(result)
    except Exception as error:  # pickling raises whatever the objects raise
        raise TypeError(
            explain(
                f"The result of `{_name(fn)}` cannot be sent back.",
                received=f"{type(result).__name__}; pickling it says: {type(error).__name__}: {error}",
                expected="an object that cloudpickle can pickle",
                do="Return plain data, such as numbers, NumPy arrays or `model.get_weights()`.",
            )
        ) from error
    folder = env.text(env.TASK_DIR)
    assert folder is not None
    unfinished = Path(folder, f".{_RESULT}")
    unfinished.write_bytes(data)
    os.replace(unfinished, Path(folder, _RESULT))


def _name(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


if __name__ == "__main__":
    main()
