"""The prerequisites of a build, searched on a temporary PATH."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tfdistkit.horovod_build.prerequisites import find_mpi_compiler, look_at_machine, look_at_needs, missing_text
from tfdistkit.horovod_build.recipe import BuildOptions
from tfdistkit.horovod_build.target import Target

ALL = BuildOptions(with_mpi=True, with_nccl=True)
# What the shell would say of where things are must not decide here.
STEERING = ("CXX", "CUDA_HOME", "HOROVOD_CUDA_HOME", "HOROVOD_CMAKE", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE")


@pytest.fixture(autouse=True)
def _nothing_in_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STEERING:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def target(tmp_path: Path) -> Target:
    header = tmp_path / "include" / "tensorflow" / "core" / "framework" / "op.h"
    header.parent.mkdir(parents=True)
    header.touch()
    (tmp_path / "bin").mkdir()
    return Target(
        *("/env/bin/python", "3.11.7", "cp311", "linux_x86_64", "glibc-2.36", "/env/bin"),
        *(True, (), "2.21.0", (), str(tmp_path / "include")),
    )


def command(folder: Path, name: str, says: str = "", code: int = 0) -> None:
    """A command that says something; it reads its input, as a compiler would."""
    path = folder / name
    path.write_text(f"#!/bin/sh\nwhile read -r line; do :; done\necho '{says}'\nexit {code}\n")
    path.chmod(0o755)


def missing(target: Target, folder: Path, options: BuildOptions = ALL) -> set[str]:
    needs = look_at_needs(options, target, {"PATH": str(folder / "bin")})
    return {need.what for need in needs if not need.found}


def test_all_prerequisites_are_missing(target: Target, tmp_path: Path) -> None:
    nothing = {"a C++17 compiler", "make", "CMake 3.13 or later"}
    assert missing(target, tmp_path, BuildOptions()) == nothing
    text = missing_text(look_at_needs(BuildOptions(), target, {"PATH": str(tmp_path / "bin")}))
    assert "  a C++17 compiler: apt-get install g++\n" in text and "apt-get install cmake" in text
    with_mpi = look_at_needs(BuildOptions(with_mpi=True), target, {"PATH": str(tmp_path / "bin")})
    assert "MPI: apt-get install openmpi-bin libopenmpi-dev (or leave it out: --without-mpi)" in missing_text(with_mpi)


def test_all_prerequisites_are_found(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("c++", "make", "mpicxx"):
        command(tmp_path / "bin", name)
    command(tmp_path / "bin", "cmake", "cmake version 4.0.1-rc1")
    cuda = tmp_path / "cuda"
    for name in ("bin", "include"):
        (cuda / name).mkdir(parents=True)
    command(cuda / "bin", "nvcc")
    (cuda / "include" / "nccl.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(cuda))
    needs = look_at_needs(ALL, target, {"PATH": str(tmp_path / "bin")})
    assert missing_text(needs) == ""
    assert {need.what for need in needs} >= {"MPI", "the CUDA toolkit", "NCCL", "pip", "TensorFlow's headers"}


def test_unusable_tools_count_as_missing(target: Target, tmp_path: Path) -> None:
    command(tmp_path / "bin", "c++", code=1)  # without its headers
    command(tmp_path / "bin", "make")
    command(tmp_path / "bin", "cmake", "cmake version 3.12.4")
    assert missing(target, tmp_path, BuildOptions()) == {"a C++17 compiler", "CMake 3.13 or later"}


def test_any_working_compiler_is_found(target: Target, tmp_path: Path) -> None:
    command(tmp_path / "bin", "c++", code=1)
    command(tmp_path / "bin", "clang++")
    assert "a C++17 compiler" not in missing(target, tmp_path)


def test_cxx_selects_the_compiler(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path / "bin", "c++")
    monkeypatch.setenv("CXX", "g++-99")
    assert "a C++17 compiler" in missing(target, tmp_path)


def test_an_environment_without_pip_or_headers(target: Target, tmp_path: Path) -> None:
    bare = dataclasses.replace(target, has_pip=False, include="/nowhere")
    assert {"pip", "TensorFlow's headers"} <= missing(bare, tmp_path)


def test_the_mpi_is_identified(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert find_mpi_compiler(path) is None and look_at_machine(path).mpi == ""
    command(tmp_path, "mpicxx", "g++ -I/opt-of-mpi -lmpi")
    found = look_at_machine(path)
    assert found.mpi == f"{tmp_path}/mpicxx: g++ -I/opt-of-mpi -lmpi"
    assert found.cores >= 1 and found.memory_bytes > 0
