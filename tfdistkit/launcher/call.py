"""A function call as a program: `tfdistkit.launch` writes it to a file, each worker runs it and writes its result.

cloudpickle serializes by value what a plain pickle would import, so functions defined in a notebook work.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdistkit import env
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher import call_pickle
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
        fn: The function that each worker calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The program for `JobSpec.program`.

    Raises:
        OptionError: if the function or an argument cannot be pickled.
    """
    try:
        call = call_pickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:  # pickling raises whatever the objects raise
        raise OptionError(
            explain(
                "`fn` and its arguments must be objects that cloudpickle can pickle.",
                received=f"{_name(fn)}, which fails with {type(error).__name__}: {error}",
                do="Open files and create locks, models and datasets inside the function.",
            )
        ) from error
    make_folder(run_dir)
    # The call is pickled on its own: `sys.path` must be set before unpickling it imports modules.
    write_file(run_dir / _CALL, pickle.dumps((sys.path, call)))
    return ("-m", __name__, str(run_dir / _CALL))


def read_result(folder: Path) -> Any:
    """Returns the result of the call on one worker.

    Args:
        folder: The worker's own folder.

    Raises:
        FileNotFoundError: if the worker wrote no result.
    """
    return pickle.loads((folder / _RESULT).read_bytes())  # noqa: S301


def remove_results(run_dir: Path) -> None:
    """Removes the results of an earlier run from a run folder."""
    for stale in left_in(run_dir, _RESULT):
        stale.unlink()


def main() -> None:
    """Runs in the worker: calls the function in the file named on the command line, and writes its result."""
    path, call = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301
    sys.path[:] = path
    fn, args, kwargs = pickle.loads(call)  # noqa: S301
    result = fn(*args, **kwargs)
    try:
        data = call_pickle.dumps(result)
    except Exception as error:  # pickling raises whatever the objects raise
        raise TypeError(
            explain(
                f"The result of `{_name(fn)}` must be an object that cloudpickle can pickle.",
                received=f"{type(result).__name__}, which fails with {type(error).__name__}: {error}",
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
