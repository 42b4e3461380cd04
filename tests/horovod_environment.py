"""Horovod for the tests: out of the cache of built wheels, or built into it, and unpacked into a folder."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

from tfdistkit.errors import MissingDependencyError
from tfdistkit.horovod_build.installing import make_wheel, plan_build
from tfdistkit.horovod_build.wheels import WheelCache


class Unavailable(Exception):
    """This machine cannot build Horovod; the text tells why, in one line."""


def provide_horovod(folder: Path, may_build: bool) -> Path:
    """Unpacks Horovod for the Python that runs the tests, with MPI where `mpirun` is.

    A build that fails is an error; that the machine has no compiler is not.

    Args:
        folder: An empty folder.
        may_build: Whether to build it if it is not in the cache, which takes minutes.

    Returns:
        The folder: an entry for PYTHONPATH. It holds a file `with-mpi` where MPI is in.

    Raises:
        Unavailable: if it must be built and may not be, or if something that the build needs is missing.
    """
    try:
        plan = plan_build(sys.executable, with_mpi=None if shutil.which("mpirun") else False, with_nccl=False)
        cache = WheelCache()
        if not may_build and cache.find(plan.name) is None:
            raise Unavailable("It is not built. `make test-all` builds it.")
        wheel = make_wheel(plan, cache, lambda line: print(line, flush=True))
    except MissingDependencyError as error:
        first, *rest = (line.strip() for line in str(error).splitlines())
        raise Unavailable(f"{first} {'; '.join(rest)}") from error
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    if plan.options.with_mpi:
        (folder / "with-mpi").touch()
    return folder
