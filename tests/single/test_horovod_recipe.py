"""The recipe of the build as tables; and the source, which must match its checksum."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from pathlib import Path

import pytest

from tfdistkit.errors import BuildFailedError
from tfdistkit.horovod_build import recipe, source
from tfdistkit.horovod_build.recipe import BuildOptions, Machine, build_variables, wheel_name
from tfdistkit.horovod_build.target import Target

TARGET = Target(
    executable="/env/bin/python",
    version="3.11.7",
    tag="cp311",
    platform="linux_x86_64",
    libc="glibc-2.36",
    scripts="/env/bin",
    has_pip=True,
    packages=(),
    tensorflow="2.21.0",
    compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=1",),
    include="/env/include",
)
MACHINE = Machine(mpi="Open MPI 4", cpu_flags=("avx",), cores=8, memory_bytes=64 * 1024**3)
MPI = BuildOptions(with_mpi=True)


def test_variables_with_mpi() -> None:
    found = build_variables(MPI, TARGET, MACHINE, {"PATH": "/usr/bin"})
    assert found["PATH"] == "/env/bin:/usr/bin"
    assert (found["HOROVOD_WITH_GLOO"], found["HOROVOD_WITH_MPI"], found["HOROVOD_WITH_TENSORFLOW"]) == ("1", "1", "1")
    assert "HOROVOD_WITHOUT_MPI" not in found and "HOROVOD_GPU_OPERATIONS" not in found
    assert found["MAKEFLAGS"] == "-j8"
    assert found["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"


def test_variables_without_mpi_and_with_nccl() -> None:
    found = build_variables(BuildOptions(with_nccl=True), TARGET, MACHINE, {})
    assert found["HOROVOD_WITHOUT_MPI"] == "1" and "HOROVOD_WITH_MPI" not in found
    assert found["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_variables_of_the_shell() -> None:
    shell = {"MAKEFLAGS": "-j3", "HOROVOD_CUDA_HOME": "/cuda", "HOROVOD_GPU": "ROCM", "CCL_ROOT": "/ccl", "CXX": "g++"}
    found = build_variables(MPI, TARGET, MACHINE, shell)
    assert found["MAKEFLAGS"] == "-j3"
    assert found["HOROVOD_GPU"] is None and found["CCL_ROOT"] is None
    assert "HOROVOD_CUDA_HOME" not in found and "CXX" not in found


@pytest.mark.parametrize(("cores", "gigabytes", "jobs"), [(1, 64, 1), (16, 7, 3), (16, 1, 1)])
def test_memory_limits_the_number_of_jobs(cores: int, gigabytes: int, jobs: int) -> None:
    machine = dataclasses.replace(MACHINE, cores=cores, memory_bytes=gigabytes * 1024**3)
    assert build_variables(MPI, TARGET, machine, {})["MAKEFLAGS"] == f"-j{jobs}"


def test_the_name_of_a_wheel() -> None:
    name = wheel_name(MPI, TARGET, MACHINE, {})
    assert name.startswith("horovod-0.28.1-tf2.21.0-cp311-linux_x86_64-gloo-mpi-")
    assert name == wheel_name(MPI, TARGET, MACHINE, {"MAKEFLAGS": "-j1", "HOME": "/x"})


@pytest.mark.parametrize("change", ["options", "tensorflow", "flags", "tag", "platform", "libc", "mpi", "cpu", "CXX"])
def test_a_different_build_has_another_name(change: str) -> None:
    options, target, machine, shell = MPI, TARGET, MACHINE, {}
    if change == "options":
        options = BuildOptions(with_mpi=True, with_nccl=True)
    elif change == "flags":
        target = dataclasses.replace(TARGET, compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=0",))
    elif change == "CXX":
        shell = {"CXX": "clang++"}
    elif change in ("mpi", "cpu"):
        machine = dataclasses.replace(MACHINE, **({"mpi": "MPICH"} if change == "mpi" else {"cpu_flags": ()}))
    else:
        target = dataclasses.replace(TARGET, **{change: "another"})
    assert wheel_name(options, target, machine, shell) != wheel_name(MPI, TARGET, MACHINE, {})


def test_the_path_of_the_environment_does_not_change_the_name() -> None:
    elsewhere = dataclasses.replace(TARGET, executable="/b/bin/python", scripts="/b/bin", include="/b", packages=("x",))
    assert wheel_name(MPI, elsewhere, MACHINE, {}) == wheel_name(MPI, TARGET, MACHINE, {})
    # Without MPI in it, it does not matter which one is here.
    without = dataclasses.replace(MACHINE, mpi="")
    assert wheel_name(BuildOptions(), TARGET, without, {}) == wheel_name(BuildOptions(), TARGET, MACHINE, {})


def archive_with(folder: Path, files: dict[str, str]) -> Path:
    path = folder / recipe.ARCHIVE
    with tarfile.open(path, "w:gz") as packed:
        for name, text in {**files, "setup.py": "raise SystemExit('it ran')"}.items():
            member = tarfile.TarInfo(f"horovod-{recipe.VERSION}/{name}")
            member.size = len(text.encode())
            packed.addfile(member, io.BytesIO(text.encode()))
    return path


def test_the_source_is_edited(tmp_path: Path) -> None:
    files, edited = {}, {}
    for name, before, after in recipe.EDITS:
        files[name] = files.get(name, "") + f"first()\n{before}\nlast()\n"
        edited[name] = edited.get(name, "") + f"first()\n{after}\nlast()\n"
    unpacked = source.unpack_source(archive_with(tmp_path, files), tmp_path)
    assert {name: (unpacked / name).read_text() for name in files} == edited


def test_an_archive_with_another_checksum_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    archive = archive_with(tmp_path, {})
    with pytest.raises(BuildFailedError, match=f"it was not run.*{recipe.ARCHIVE_SHA256}"):
        source.fetch_source("no-python", tmp_path, tmp_path / "work", tmp_path / "log", print)
    assert archive.exists(), "it is the user's to remove"
    with pytest.raises(BuildFailedError, match="cannot be read"):
        source.check_source(tmp_path / "absent")


def test_pip_verifies_the_checksum_too() -> None:
    command = recipe.download_command("python", "r.txt", "out")
    assert "--require-hashes" in command and "--no-deps" in command
    assert recipe.requirement() == f"horovod==0.28.1 --hash=sha256:{recipe.ARCHIVE_SHA256}\n"
