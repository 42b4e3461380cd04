"""Runs a script in a worker process as plain Python would: `python -m tfdistkit.worker script.py ...`.

```
python -m tfdistkit.worker script.py [args]
python -m tfdistkit.worker -m module [args]
```

The script gets the `__main__`, `sys.argv`, `__file__` and `sys.path[0]` of `python script.py`, and keeps them until the
interpreter exits. After an exception or an exit code other than 0, this module writes a crash record into the run
folder (see `tfdistkit.report.crashes`). When the launcher dies, this process is killed.
"""

from __future__ import annotations

import sys

# `python -m` has put the current folder first, except under `python -P`. A file in it that is named like a module of
# Python (`signal.py`) would replace that module below, which it does not do to `python folder/script.py`.
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)

import builtins
import contextlib
import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import signal
import time
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from tfdistkit import env
from tfdistkit.report import broken_exit  # noqa: F401  # its exit function must be registered before the script's
from tfdistkit.report.alone import leave_alone_mark
from tfdistkit.report.crashes import CrashRecord, kinds_of, write_crash
from tfdistkit.report.hangs import notes, stacks
from tfdistkit.report.no_terminal import explain_empty_input
from tfdistkit.report.progress import leave_steps, steps_taken
from tfdistkit.report.tracebacks import folded, whole

# prctl(2): the signal sent to a process when its parent exits.
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the program named in `sys.argv`, and exits as the program does."""
    _die_with_launcher()
    if env.text(env.ELASTIC) is not None:
        # The launcher asks for a backup by it; only `BackupAndResume` can make one. Child processes ignore it too.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    notes.begin()
    stacks.answer_requests()
    pid = os.getpid()
    try:
        code, namespace = _program_as_main()
        exec(code, namespace)  # noqa: S102
        if os.getpid() == pid:
            _leave_marks()
    except SystemExit as leave:
        if os.getpid() != pid:  # a process that the script forked exits here, not the worker
            raise
        if _exit_code(leave):
            _record(leave, _without_own_frames(leave.__traceback__))
        else:
            _leave_marks()
        raise
    except BaseException as error:
        own = _without_own_frames(error.__traceback__)
        error.__traceback__ = own
        explain_empty_input(error)
        if os.getpid() == pid:
            _record(error, own)
        # Prints the traceback in place of the interpreter, with the frames of the script only. The interpreter then
        # sets the exit code: 1, or death by SIGINT after a KeyboardInterrupt.
        _show(error, own)
        sys.excepthook = _print_nothing
        raise


def _leave_marks() -> None:
    leave_alone_mark()
    leave_steps()


def _show(error: BaseException, tb: TracebackType | None) -> None:
    """Prints an exception: under a launcher with library frames folded, unless the script has its own `excepthook`.

    Writes it at once, so that the launcher can detect another rank that prints the same.
    """
    if env.text(env.TASK_DIR) is None or sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, tb)
        return
    text = folded(error, tb)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or None
        sys.stderr.write(text)
        sys.stderr.flush()


def _die_with_launcher() -> None:
    launcher = env.integer(env.PARENT_PID)
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it exited before the prctl call
        os._exit(128 + signal.SIGKILL)


def _program_as_main() -> tuple[CodeType, dict[str, Any]]:
    if sys.argv[1] == "-m":
        return _module_as_main()
    if sys.argv[1] == "--text":
        return _text_as_main()
    path = _absolute(sys.argv[1])
    # An importer exists for a folder or a zip file of any name.
    return _script_as_main() if pkgutil.get_importer(path) is None else _container_as_main(path)


def _absolute(path: str) -> str:
    # Not by `os.path.join` alone: the current folder of a job may have been removed.
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _script_as_main() -> tuple[CodeType, dict[str, Any]]:
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    # As Python: `__file__` is absolute, and symbolic links are resolved for `sys.path[0]` only.
    path = _absolute(script)
    _put_first_on_path(os.path.dirname(os.path.realpath(path)))
    main = _new_main(__file__=path, __cached__=None, __package__=None, __spec__=None)
    main["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True), main


def _container_as_main(path: str) -> tuple[CodeType, dict[str, Any]]:
    sys.argv[:] = sys.argv[1:]
    _put_first_on_path(path)
    if sys.path[0] != path:  # python -P omits the folders of scripts, not this one
        sys.path.insert(0, path)
    # While this module is `__main__`, `find_spec` would return it.
    del sys.modules["__main__"]
    spec = importlib.util.find_spec("__main__")
    code = _code_of(spec)
    if spec is None or code is None:
        sys.exit(f"{sys.executable}: can't find '__main__' module in {path!r}")
    return code, _main_of(spec)


def _text_as_main() -> tuple[CodeType, dict[str, Any]]:
    """Compiles a script that the launcher read from a pipe, for `--text <file> <folder> <name> ...`."""
    stored, folder, name = sys.argv[2:5]
    sys.argv[:] = sys.argv[4:]
    _put_first_on_path(folder)
    path = "<stdin>" if name == "-" else _absolute(name)
    main = _new_main(__file__=path, __cached__=None, __package__=None, __spec__=None)
    is_file = name != "-"
    main["__loader__"] = (
        importlib.machinery.SourceFileLoader("__main__", path) if is_file else importlib.machinery.BuiltinImporter
    )
    # Compiled under the name of the stored file: tracebacks and AutoGraph read its lines.
    with io.open_code(stored) as file:
        return compile(file.read(), stored, "exec", dont_inherit=True), main


def _module_as_main() -> tuple[CodeType, dict[str, Any]]:
    name = sys.argv[2]
    sys.argv[:] = ["-m", *sys.argv[3:]]
    _put_first_on_path(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    code = _code_of(spec)
    if spec is None or code is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    sys.argv[0] = str(spec.origin)
    return code, _main_of(spec)


def _code_of(spec: importlib.machinery.ModuleSpec | None) -> CodeType | None:
    # Looked up by name: the loader of zip files is not an `InspectLoader`.
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code: CodeType | None = get_code(spec.name) if spec is not None and get_code is not None else None
    return code


def _main_of(spec: importlib.machinery.ModuleSpec) -> dict[str, Any]:
    return _new_main(
        __file__=spec.origin, __cached__=spec.cached, __package__=spec.parent, __spec__=spec, __loader__=spec.loader
    )


def _new_main(**variables: Any) -> dict[str, Any]:
    """Replaces this module by a new `__main__` for good: `pickle`, `atexit` and multiprocessing need it."""
    main = ModuleType("__main__")
    vars(main).update(variables, __builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return vars(main)


def _put_first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # As `python` does, but under `python -P`.
        sys.path.insert(0, folder)


def _without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb


def _exit_code(leave: SystemExit) -> int:
    """Returns the exit code of the process (see `sys.exit`)."""
    if leave.code is None:
        return 0
    return leave.code & 0xFF if isinstance(leave.code, int) else 1


def _record(error: BaseException, tb: TracebackType | None) -> None:
    folder, rank = env.text(env.TASK_DIR), env.integer(env.RANK)
    if folder is None or rank is None:
        return
    code = _exit_code(error) if isinstance(error, SystemExit) else 1
    if isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    record = CrashRecord(
        rank=rank,
        host=os.uname().nodename,
        pid=os.getpid(),
        time=time.time(),
        exit_code=code,
        type=type(error).__name__,
        message=_text_of(error),
        traceback=folded(error, tb),
        kinds=kinds_of(error),
        steps=steps_taken(),
        full_traceback=whole(error, tb),
    )
    try:
        write_crash(Path(folder), record)
    except OSError as problem:
        print(f"tfdistkit: the crash record could not be written: {problem}", file=sys.stderr)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a broken `__str__` must not hide the failure
        return "<no text>"


def _print_nothing(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Replaces `sys.excepthook` once the exception is printed."""


if __name__ == "__main__":
    main()
