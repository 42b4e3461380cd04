"""The recipe of the build: options, variables and commands, as plain data without side effects.

Horovod 0.28.1 is the last release, and was made for TensorFlow 2.12. Against TensorFlow 2.18 to 2.21 all of it compiles
except one file, the optional operations for XLA, which include headers that TensorFlow has moved. The build omits it,
and what no wheel needs: debug information, and the copy of Gloo for TensorFlow older than 2.10.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tfdistkit.horovod_build.target import Target

VERSION = "0.28.1"
ARCHIVE = f"horovod-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# What is changed in the source: a file, relative to the source folder, a text in it, and the text in its place.
EDITS = (
    # It does not compile.
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # It is compiled only if something is linked with it.
    ("CMakeLists.txt", "add_subdirectory(third_party/gloo)", "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)"),
    ("CMakeLists.txt", '"-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO', '"-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO'),
    # The vector stays empty, and the stall check of Gloo's ranks never names a rank that a collective waits for.
    ("horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_)", "global_ranks_.resize(size_)"),
)

# The packages that setup.py imports, and those that Horovod imports.
BUILD_PACKAGES = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "PyYAML")
RUN_PACKAGES = ("packaging", "cloudpickle", "psutil", "PyYAML")

# Increment when the recipe changes the wheel: cached wheels of an older recipe become unused.
_RECIPE = 3
# Variables of the user that the build inherits: compiler, CUDA and NCCL. They are part of the wheel's name.
_RESPECTED = (
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDA_HOME",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_CMAKE",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
)
# Other variables that change the build are removed: they are not part of the wheel's name.
_STEERING_PREFIXES = ("HOROVOD_", "CCL_")

# The oldest policy version of CMake 4; Gloo, in Horovod's source, requests an older one.
_CMAKE_POLICY = "3.5"
# The compiler's memory for the largest file.
_MEMORY_PER_JOB_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class BuildOptions:
    """The optional features of the build. Gloo is always built.

    Args:
        with_mpi: Whether to build with MPI, for `mpirun`.
        with_nccl: Whether to build with NCCL, for GPUs.
    """

    with_mpi: bool = False
    with_nccl: bool = False

    @property
    def name(self) -> str:
        """The name of the options: `gloo`, `gloo-mpi`, `gloo-mpi-nccl`."""
        return "gloo" + "-mpi" * self.with_mpi + "-nccl" * self.with_nccl


@dataclass(frozen=True)
class Machine:
    """The properties of this machine that the wheel depends on, and its resources for the build.

    Args:
        mpi: The identity of MPI, from its compiler wrapper; empty without MPI.
        cpu_flags: The processor features that the compiler would use.
        cores: The number of usable cores.
        memory_bytes: The free memory.
    """

    mpi: str
    cpu_flags: tuple[str, ...]
    cores: int
    memory_bytes: int


def build_variables(
    options: BuildOptions, target: Target, machine: Machine, inherited: Mapping[str, str]
) -> dict[str, str | None]:
    """Returns the variables of the build; None removes one.

    Args:
        options: The options of the build.
        target: The Python environment to build for.
        machine: The machine that builds.
        inherited: The variables of this process.
    """
    removed: dict[str, str | None] = {
        name: None for name in inherited if name.startswith(_STEERING_PREFIXES) and name not in _RESPECTED
    }
    jobs = max(1, min(machine.cores, machine.memory_bytes // _MEMORY_PER_JOB_BYTES))
    return {
        **removed,
        # The target's commands first: pip may have installed `cmake` there.
        "PATH": os.pathsep.join([target.scripts, inherited.get("PATH", os.defpath)]),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        ("HOROVOD_WITH_MPI" if options.with_mpi else "HOROVOD_WITHOUT_MPI"): "1",
        **({"HOROVOD_GPU_OPERATIONS": "NCCL"} if options.with_nccl else {}),
        "CMAKE_POLICY_VERSION_MINIMUM": _CMAKE_POLICY,
        "MAKEFLAGS": inherited.get("MAKEFLAGS") or f"-j{jobs}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def wheel_name(options: BuildOptions, target: Target, machine: Machine, inherited: Mapping[str, str]) -> str:
    """Returns the name of a build's folder in the cache, with a hash of everything that the wheel depends on.

    Args:
        options: The options of the build.
        target: The Python environment to build for.
        machine: The machine that builds.
        inherited: The variables of this process.
    """
    ingredients = {
        "recipe": _RECIPE,
        "archive": ARCHIVE_SHA256,
        "tensorflow": target.tensorflow,
        "flags": target.compile_flags,
        "tag": target.tag,
        "platform": target.platform,
        "libc": target.libc,
        "options": asdict(options),
        "mpi": machine.mpi if options.with_mpi else "",
        "cpu": machine.cpu_flags,
        "variables": {name: inherited[name] for name in _RESPECTED if inherited.get(name)},
    }
    mark = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:12]
    return f"horovod-{VERSION}-tf{target.tensorflow}-{target.tag}-{target.platform}-{options.name}-{mark}"


def download_command(python: str, requirements: str, folder: str) -> list[str]:
    """Returns the command that downloads the source distribution; pip verifies its checksum before unpacking it."""
    # Without build isolation, pip downloads nothing else.
    options = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes"]
    return [python, "-m", "pip", "download", *options, "--dest", folder, "--requirement", requirements]


def requirement() -> str:
    """Returns the line of a requirements file for Horovod's source distribution."""
    return f"horovod=={VERSION} --hash=sha256:{ARCHIVE_SHA256}\n"


def wheel_command(python: str, source: str, folder: str) -> list[str]:
    """Returns the command that builds the wheel."""
    # Without --verbose, pip prints nothing until the end.
    return [
        *(python, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps"),
        *("--no-cache-dir", "--wheel-dir", folder, source),
    ]


def install_command(python: str, wheel: str) -> list[str]:
    """Returns the command that installs the wheel, replacing any other Horovod."""
    return [python, "-m", "pip", "install", "--force-reinstall", "--no-deps", "--no-index", wheel]


def packages_command(python: str, requirements: str) -> list[str]:
    """Returns the command that installs the pinned packages from the user's package index.

    Args:
        python: The interpreter of the environment.
        requirements: The path of the file from `pinned.requirements`.
    """
    # Wheels only: a build would download and run unpinned packages.
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    return [python, "-m", "pip", "install", *options, "--requirement", requirements]
