"""What is built and how, as plain data: nothing here touches the machine.

Horovod 0.28.1 is the last release, and was made for TensorFlow 2.12. Against TensorFlow 2.18 to 2.21 all of it
compiles but one file, the optional operations for XLA, which include headers that TensorFlow has moved. It is left out.
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

# The file that does not compile, and the file in which it is listed, from the folder of the source.
LEFT_OUT = "xla_mpi_ops.cc"
LISTED_IN = "horovod/tensorflow/CMakeLists.txt"

# What its setup.py imports, and what Horovod itself imports.
BUILD_PACKAGES = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "PyYAML")
RUN_PACKAGES = ("packaging", "cloudpickle", "psutil", "PyYAML")

# To be counted up when the recipe changes what comes out: wheels of an older recipe are not used any more.
_RECIPE = 1
# Where the compiler, CUDA and NCCL are: the user's to say, and part of what the wheel is made from.
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
# All else that Horovod's build looks at would make another wheel under the same name.
_STEERING_PREFIXES = ("HOROVOD_", "CCL_")

# The oldest rules that a project may ask of CMake 4: Gloo's, in Horovod's source, asks for older ones.
_CMAKE_POLICY = "3.5"
# What the compiler needs for the largest file.
_MEMORY_PER_JOB_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class BuildOptions:
    """What Horovod can do when it is built. Gloo is always in.

    Args:
        with_mpi: MPI, for `mpirun`.
        with_nccl: NCCL, for GPUs.
    """

    with_mpi: bool = False
    with_nccl: bool = False

    @property
    def name(self) -> str:
        """The options in a word: `gloo`, `gloo-mpi`, `gloo-mpi-nccl`."""
        return "gloo" + "-mpi" * self.with_mpi + "-nccl" * self.with_nccl


@dataclass(frozen=True)
class Machine:
    """What of this machine goes into the wheel, and how much it can do at once.

    Args:
        mpi: Which MPI is here: its compiler's own description; empty without MPI.
        cpu_flags: The processor's abilities that the compiler would use.
        cores: How many cores may be used.
        memory_bytes: How much memory is free.
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
        options: What is built.
        target: The Python that it is built for.
        machine: Where it is built.
        inherited: This process's variables.
    """
    removed: dict[str, str | None] = {
        name: None for name in inherited if name.startswith(_STEERING_PREFIXES) and name not in _RESPECTED
    }
    jobs = max(1, min(machine.cores, machine.memory_bytes // _MEMORY_PER_JOB_BYTES))
    return {
        **removed,
        # Its `cmake`, if pip has installed one there.
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
    """Returns the name of the folder in the cache for the wheel of one build: what differs has another name.

    Args:
        options: What is built.
        target: The Python that it is built for.
        machine: Where it is built.
        inherited: This process's variables.
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
    """Returns the command that fetches the source distribution: pip checks its checksum before it looks into it."""
    # Without build isolation it takes nothing else from the network.
    options = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes"]
    return [python, "-m", "pip", "download", *options, "--dest", folder, "--requirement", requirements]


def requirement() -> str:
    """Returns the line of a requirements file that asks for Horovod's source distribution and nothing else."""
    return f"horovod=={VERSION} --hash=sha256:{ARCHIVE_SHA256}\n"


def wheel_command(python: str, source: str, folder: str) -> list[str]:
    """Returns the command that builds the wheel."""
    # Verbose, or pip shows nothing until the end.
    return [
        *(python, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps"),
        *("--no-cache-dir", "--wheel-dir", folder, source),
    ]


def install_command(python: str, wheel: str) -> list[str]:
    """Returns the command that installs the wheel, over any other Horovod."""
    return [python, "-m", "pip", "install", "--force-reinstall", "--no-deps", "--no-index", wheel]


def packages_command(python: str, requirements: str) -> list[str]:
    """Returns the command that installs packages from the user's package index, as they are pinned and not otherwise.

    Args:
        python: The interpreter whose packages they become.
        requirements: The path of what `pinned.requirements` returned.
    """
    # Wheels only: to build one, pip would fetch what nobody has pinned, and run it.
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    return [python, "-m", "pip", "install", *options, "--requirement", requirements]
