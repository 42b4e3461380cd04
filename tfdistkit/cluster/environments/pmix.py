"""Exchanges one text per process through PMIx, the runtime under MPI, without initialising MPI or linking to it.

`mpirun` of Open MPI 4 and later, and `srun --mpi=pmix`, serve PMIx to each process that they start, and bring its
client library. PMIx_Init is reference-counted, so MPI can call it too, before or after. PMIx_Finalize must not run in
between: it is called when the process exits.
https://pmix.github.io, the PMIx standard, chapters "Client initialization" and "Data access".
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import threading
from typing import Any

from tfdistkit import env
from tfdistkit.errors import ClusterConfigError, MissingDependencyError, RendezvousError, explain

# A process finds its PMIx server by these variables.
NAMESPACE = "PMIX_NAMESPACE"
RANK = "PMIX_RANK"

_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_KEY = b"tfdistkit.text"
# From pmix_common.h; the standard fixes these numbers.
_PMIX_SUCCESS = 0
_PMIX_GLOBAL = 3
_PMIX_STRING = 3


class _Process(ctypes.Structure):
    """pmix_proc_t"""

    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Data(ctypes.Union):
    """The union in pmix_value_t, padded to its largest member."""

    _fields_ = [("string", ctypes.c_char_p), ("padding", ctypes.c_char * 32)]


class _Value(ctypes.Structure):
    """pmix_value_t"""

    _fields_ = [("type", ctypes.c_uint16), ("data", _Data)]


def is_served() -> bool:
    """Returns whether the launcher of this process serves PMIx."""
    return env.text(NAMESPACE) is not None and env.text(RANK) is not None


def exchange(text: str, size: int, timeout_s: float) -> tuple[str, ...]:
    """Sends a text to all processes of the job, and receives theirs.

    Args:
        text: The text of this process.
        size: The number of processes.
        timeout_s: The timeout in seconds.

    Returns:
        The texts in rank order.

    Raises:
        MissingDependencyError: if the PMIx library is not found.
        RendezvousError: if not all processes take part within `timeout_s`.
        ClusterConfigError: if PMIx fails.
    """
    library = _load()
    outcome: list[tuple[str, ...] | Exception] = []

    def run() -> None:
        try:
            outcome.append(_exchange(library, text, size))
        except Exception as error:
            outcome.append(error)

    # In a thread: PMIx waits for its peers without a timeout, and cannot be interrupted.
    thread = threading.Thread(target=run, name="tfdistkit-pmix", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise RendezvousError(
            explain(
                f"All {size} processes must exchange their addresses through PMIx within {timeout_s:g} s.",
                received=f"process {env.text(RANK)} waited",
                expected="every process to make the strategy",
                do="Read the logs of the other processes; raise `timeout_s` if some start late.",
            )
        )
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _exchange(library: ctypes.CDLL, text: str, size: int) -> tuple[str, ...]:
    own = _Process()
    _check("PMIx_Init", library.PMIx_Init(ctypes.byref(own), None, ctypes.c_size_t(0)))
    # A process that exits without PMIx_Finalize counts as crashed.
    atexit.register(library.PMIx_Finalize, None, ctypes.c_size_t(0))
    value = _Value(_PMIX_STRING)
    value.data.string = text.encode()
    _check("PMIx_Put", library.PMIx_Put(ctypes.c_uint8(_PMIX_GLOBAL), _KEY, ctypes.byref(value)))
    _check("PMIx_Commit", library.PMIx_Commit())
    # A barrier: all processes have committed before one reads.
    _check("PMIx_Fence", library.PMIx_Fence(None, ctypes.c_size_t(0), None, ctypes.c_size_t(0)))
    return tuple(_get(library, _Process(own.namespace, rank)) for rank in range(size))


def _get(library: ctypes.CDLL, process: _Process) -> str:
    found: Any = ctypes.POINTER(_Value)()
    code = library.PMIx_Get(ctypes.byref(process), _KEY, None, ctypes.c_size_t(0), ctypes.byref(found))
    _check(f"PMIx_Get of process {process.rank}", code)
    return str(found.contents.data.string.decode())


def _check(what: str, code: int) -> None:
    if code != _PMIX_SUCCESS:
        raise ClusterConfigError(
            explain(
                "PMIx, through which the processes of mpirun exchange addresses, failed.",
                received=f"{what}: error {code}",
                expected="processes that `mpirun` or `srun --mpi=pmix` started",
                do="Start the script directly with one of them, or with `tfdistkit run`, which needs no PMIx.",
            )
        )


def _load() -> ctypes.CDLL:
    for path in _candidates():
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise MissingDependencyError(
        explain(
            "The PMIx library was not found.",
            received=f"none of {', '.join(_candidates())}",
            expected="the library that comes with Open MPI or SLURM",
            do="Install it (apt-get install libpmix2), or add its folder to LD_LIBRARY_PATH.",
        )
    )


def _candidates() -> list[str]:
    """Returns the names for the loader's search path, and the paths beside the `mpirun` on the PATH."""
    mpirun = shutil.which("mpirun")
    prefixes = [env.text("OPAL_PREFIX"), os.path.dirname(os.path.dirname(os.path.realpath(mpirun))) if mpirun else None]
    beside = [os.path.join(prefix, "lib", _LIBRARIES[0]) for prefix in prefixes if prefix]
    return [*_LIBRARIES, *beside]
