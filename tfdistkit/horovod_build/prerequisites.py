"""Find the prerequisites of a build on this machine, and say how to install those that are missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit import env
from tfdistkit.horovod_build.recipe import BuildOptions, Machine
from tfdistkit.horovod_build.target import Target
from tfdistkit.supported import INSTALL_TENSORFLOW

_DEADLINE_S = 60.0
# Horovod's own lowest version of CMake.
_OLDEST_CMAKE = (3, 13)
# The names under which CMake looks for a compiler, and for MPI's.
_COMPILERS = ("c++", "g++", "clang++")
_MPI_COMPILERS = ("mpicxx", "mpic++", "mpiCC", "mpicxx.mpich", "mpicxx.openmpi")
# The processor features that Horovod's build detects.
_CPU_FLAGS = ("avx", "f16c", "fma")
_PROBE = "#include <vector>\n#include <string_view>\n#include <pthread.h>\nint main() { return 0; }\n"


@dataclass(frozen=True)
class Prerequisite:
    """One prerequisite of a build.

    Args:
        what: Its name.
        found: Its path or version on this machine; empty if missing.
        install: The command or address to install it.
    """

    what: str
    found: str
    install: str


def look_at_needs(
    options: BuildOptions, target: Target, variables: Mapping[str, str | None]
) -> tuple[Prerequisite, ...]:
    """Searches this machine for the prerequisites of a build.

    Args:
        options: The options of the build.
        target: The Python that it is built for.
        variables: The variables of the build, see `recipe.build_variables`.

    Returns:
        All prerequisites, found or not, except Python packages, which `tfdistkit horovod install` installs itself.
    """
    path = variables.get("PATH") or os.defpath
    header = Path(target.include, "tensorflow", "core", "framework", "op.h")
    install = f"{target.executable} -m {INSTALL_TENSORFLOW}"
    needs = [
        Prerequisite("pip", "pip" if target.has_pip else "", f"{target.executable} -m ensurepip"),
        Prerequisite("TensorFlow's headers", str(header.parent) if header.is_file() else "", install),
        Prerequisite("a C++17 compiler", _compiler(path), "apt-get install g++"),
        Prerequisite("make", shutil.which("make", path=path) or "", "apt-get install make"),
        Prerequisite("CMake 3.13 or later", _cmake(path), "apt-get install cmake (or pip install cmake)"),
    ]
    if options.with_mpi:
        found = find_mpi_compiler(path) or ""
        install = "apt-get install openmpi-bin libopenmpi-dev (or leave it out: --without-mpi)"
        needs.append(Prerequisite("MPI", found, install))
    if options.with_nccl:
        home = env.text("HOROVOD_CUDA_HOME") or env.text("CUDA_HOME") or "/usr/local/cuda"
        nvcc = shutil.which("nvcc", path=os.pathsep.join([f"{home}/bin", path])) or ""
        install = "https://developer.nvidia.com/cuda-downloads, and set CUDA_HOME"
        needs.append(Prerequisite("the CUDA toolkit", nvcc, install))
        needs.append(Prerequisite("NCCL", _nccl(home), "apt-get install libnccl-dev, or set HOROVOD_NCCL_HOME"))
    return tuple(needs)


def missing_text(needs: Sequence[Prerequisite]) -> str:
    """Returns one line per missing prerequisite; empty if none is missing."""
    return "\n".join(f"  {need.what}: {need.install}" for need in needs if not need.found)


def look_at_machine(path: str) -> Machine:
    """Describes the properties of this machine that the wheel depends on.

    Args:
        path: The search path for commands.
    """
    return Machine(
        mpi=_mpi_description(path),
        cpu_flags=_cpu_flags(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_free_memory_bytes(),
    )


def find_mpi_compiler(path: str) -> str | None:
    """Returns the path of MPI's compiler wrapper, or None."""
    return next((found for name in _MPI_COMPILERS if (found := shutil.which(name, path=path))), None)


def _compiler(path: str) -> str:
    """Returns a compiler that compiles a probe: one may be installed without its headers."""
    own = env.text("CXX")
    for name in (own,) if own else _COMPILERS:
        found = shutil.which(name, path=path)
        if found and _output([found, "-std=c++17", "-x", "c++", "-fsyntax-only", "-"], _PROBE) is not None:
            return found
    return ""


def _cmake(path: str) -> str:
    found = shutil.which(env.text("HOROVOD_CMAKE") or "cmake", path=path)
    version = re.search(r"version\s+(\d+)\.(\d+)[\d.]*", _output([found, "--version"]) or "") if found else None
    if version is None or (int(version[1]), int(version[2])) < _OLDEST_CMAKE:
        return ""
    return f"{found} ({version[0]})"


def _nccl(cuda_home: str) -> str:
    home = env.text("HOROVOD_NCCL_HOME")
    places = [
        *filter(None, [env.text("HOROVOD_NCCL_INCLUDE")]),
        *(f"{place}/include" for place in (home, cuda_home, "/usr", "/usr/local") if place),
    ]
    return next((str(header) for place in places if (header := Path(place, "nccl.h")).is_file()), "")


def _mpi_description(path: str) -> str:
    """Identifies the MPI: a wheel built with another MPI does not load."""
    compiler = find_mpi_compiler(path)
    if compiler is None:
        return ""
    # Open MPI, MPICH and its derivatives support `-show`.
    return f"{os.path.realpath(compiler)}: {(_output([compiler, '-show']) or '').strip()}"


def _cpu_flags() -> tuple[str, ...]:
    try:
        words = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text().partition("\n\n")[0]))
    except OSError:
        return ()
    return tuple(flag for flag in _CPU_FLAGS if flag in words)


def _free_memory_bytes() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 1 << 62
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 1 << 62


def _output(command: list[str], stdin: str = "") -> str | None:
    """Returns the stdout of a command; None if it fails."""
    try:
        ended = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None
