"""Each process tells all others one text through PMIx, the runtime under MPI: no MPI is initialised, nothing is linked.

`mpirun` of Open MPI 4 and later, and `srun --mpi=pmix`, serve PMIx to each process that they start. Its client library
comes with them; six of its functions are called here. Initialising it is counted, so that MPI can do it too, before or
afterwards, as long as nobody ends it in between: that is done when the process ends.
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

# By these a process finds its PMIx server.
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
    """The union in pmix_value_t, with room for its largest member."""

    _fields_ = [("string", ctypes.c_char_p), ("room", ctypes.c_char * 32)]


class _Value(ctypes.Structure):
    """pmix_value_t"""

    _fields_ = [("type", ctypes.c_uint16), ("data", _Data)]


def is_served() -> bool:
    """Whether whoever started this process serves PMIx to it."""
    return env.text(NAMESPACE) is not None and env.text(RANK) is not None


def exchange(text: str, size: int, timeout_s: float) -> tuple[str, ...]:
    """Tells all processes of the job a text, and waits for those of the others.

    Args:
        text: What to tell.
        size: How many processes there are.
        timeout_s: How long to wait for the others, in seconds.

    Returns:
        The texts in rank order.

    Raises:
        MissingDependencyError: if PMIx's library is not found.
        RendezvousError: if the others do not come within `timeout_s`.
        ClusterConfigError: if PMIx fails.
    """
    library = _load()
    outcome: list[tuple[str, ...] | Exception] = []

    def run() -> None:
        try:
            outcome.append(_exchange(library, text, size))
        except Exception as error:
            outcome.append(error)

    # In a thread: PMIx waits for the others for ever, and cannot be interrupted.
    thread = threading.Thread(target=run, name="tfdistkit-pmix", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise RendezvousError(
            explain(
                f"Not all {size} processes came within {timeout_s:g} s to tell their addresses through PMIx.",
                received=f"process {env.text(RANK)} waited",
                expected="every process to ask for the strategy",
                do="Look at the logs of the others; raise `timeout_s` if some only start late.",
            )
        )
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _exchange(library: ctypes.CDLL, text: str, size: int) -> tuple[str, ...]:
    own = _Process()
    _check("PMIx_Init", library.PMIx_Init(ctypes.byref(own), None, ctypes.c_size_t(0)))
    # A process that ends without it counts as crashed.
    atexit.register(library.PMIx_Finalize, None, ctypes.c_size_t(0))
    value = _Value(_PMIX_STRING)
    value.data.string = text.encode()
    _check("PMIx_Put", library.PMIx_Put(ctypes.c_uint8(_PMIX_GLOBAL), _KEY, ctypes.byref(value)))
    _check("PMIx_Commit", library.PMIx_Commit())
    # All are there before anybody reads.
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
                "PMIx, by which MPI's launcher lets processes find each other, failed.",
                received=f"{what}: error {code}",
                expected="processes that `mpirun` or `srun --mpi=pmix` started",
                do="Start the script directly with it; or with `tfdistkit run`, which needs no PMIx.",
            )
        )


def _load() -> ctypes.CDLL:
    for path in _candidates():
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise MissingDependencyError(
        explain(
            "PMIx's library was not found.",
            received=f"none of {', '.join(_candidates())}",
            expected="the one that came with Open MPI, or with SLURM",
            do="Install it (apt-get install libpmix2), or add its folder to LD_LIBRARY_PATH.",
        )
    )


def _candidates() -> list[str]:
    """Where the loader looks, and beside the `mpirun` on the PATH, which may bring its own."""
    mpirun = shutil.which("mpirun")
    prefixes = [env.text("OPAL_PREFIX"), os.path.dirname(os.path.dirname(os.path.realpath(mpirun))) if mpirun else None]
    beside = [os.path.join(prefix, "lib", _LIBRARIES[0]) for prefix in prefixes if prefix]
    return [*_LIBRARIES, *beside]
