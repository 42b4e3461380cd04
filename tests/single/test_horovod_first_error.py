"""The first error in a long log: in logs of a real compiler if there is one, and in recorded logs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfdistkit.errors import BuildFailedError
from tfdistkit.horovod_build.commands import run_logged
from tfdistkit.horovod_build.first_error import first_error

NOISE = "\n".join(f"[ {n:2}%] Building CXX object CMakeFiles/x.dir/file{n}.cc.o" for n in range(50))
WARNING = """\
/src/old.h:12:5: warning: 'void f()' is deprecated [-Wdeprecated-declarations]
   12 |     f();
      |     ^~~"""


def log_of(*parts: str) -> str:
    return "\n".join([NOISE, *parts, NOISE, "make: *** [Makefile:136: all] Error 2", "ERROR: Failed building wheel"])


@pytest.mark.parametrize(
    ("part", "first", "last"),
    [
        (
            "In file included from /src/horovod/mpi_ops.h:9,\n"
            "                 from /src/horovod/mpi_ops.cc:20:\n"
            "/tf/include/platform/types.h:18:10: fatal error: highwayhash/arch_specific.h: No such file or directory\n"
            '   18 | #include "highwayhash/arch_specific.h"\n'
            "      |          ^~~~~~~~~~~~~~~~~~~~~~~~~~~~~\n"
            "compilation terminated.",
            "In file included from /src/horovod/mpi_ops.h:9,",
            "      |          ^~~~~~~~~~~~~~~~~~~~~~~~~~~~~",
        ),
        (
            "/src/a.cc:3:10: error: 'x' was not declared in this scope",
            "/src/a.cc:3:10: error: 'x' was not declared in this scope",
            "/src/a.cc:3:10: error: 'x' was not declared in this scope",
        ),
        ('/src/k.cu(35): error: identifier "x" is undefined', "/src/k.cu(35): error: identifier", "is undefined"),
        (
            "CMake Error at CMakeLists.txt:3 (find_package):\n  Could NOT find NCCL\n\nCall Stack:\n  more",
            "CMake Error at CMakeLists.txt:3 (find_package):",
            "more",
        ),
        (
            "CMake Error at /usr/share/cmake/Modules/CMakeTestCXXCompiler.cmake:63 (message):\n  The C++ compiler\n\n"
            '    "/usr/bin/c++"\n\n  is not able to compile a simple test program.\n\n  It fails with the following'
            " output:\n\n    Change Dir: /tmp/x\n\n    cc1plus: fatal error: /gone.h: No such file or directory\n"
            "    compilation terminated.\n    gmake[1]: *** [x] Error 1",
            "CMake Error at /usr/share/cmake/Modules/CMakeTestCXXCompiler.cmake:63 (message):",
            "cc1plus: fatal error: /gone.h: No such file or directory",
        ),
        ("/usr/bin/ld: cannot find -lmpi: No such file", "/usr/bin/ld: cannot find -lmpi", "such file"),
        ("a.o: in f():\na.cc:5: undefined reference to `g()'", "a.cc:5: undefined reference to `g()'", "`g()'"),
        (
            "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
            "c++: fatal error: Killed signal terminated program cc1plus",
            "The machine ran out of memory: try again with MAKEFLAGS=-j1.",
        ),
        ("fatal error: error writing to /tmp/x.s: No space left on device", "fatal error: error writing", "TMPDIR."),
        (
            "Traceback (most recent call last):\n  File \"setup.py\", line 3\nModuleNotFoundError: No module named 'x'",
            "ModuleNotFoundError: No module named 'x'",
            "ModuleNotFoundError: No module named 'x'",
        ),
    ],
)
def test_recorded_logs(part: str, first: str, last: str) -> None:
    later = "/src/later.cc:1:1: error: a consequence"
    found = first_error(log_of(WARNING, part, "", *[""] * 10, later)).splitlines()
    assert found[0].startswith(first)
    assert found[-1].endswith(last) or [line for line in found if line.strip()][-1].endswith(last), found
    assert len(found) <= 13 and later not in found and "deprecated" not in "".join(found)


def test_an_error_of_make_is_the_fallback() -> None:
    assert first_error(log_of("nothing here")).startswith("make: *** [Makefile:136: all] Error 2")


def test_without_an_error_the_end_is_shown() -> None:
    assert first_error("\n".join(f"line {n}" for n in range(100))).splitlines()[-1] == "line 99"
    assert len(first_error("\n".join(f"line {n}" for n in range(100))).splitlines()) == 12
    assert first_error("") == ""


def test_a_real_build(tmp_path: Path) -> None:
    has_tools = shutil.which("cmake") and shutil.which("c++") and shutil.which("make")
    if not has_tools and os.environ.get("TFDISTKIT_REQUIRE_HOROVOD") != "1":
        pytest.skip("no compiler, make and CMake on this machine")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.13)\nproject(toy CXX)\nadd_library(toy SHARED good.cc bad.cc worse.cc)\n"
    )
    (tmp_path / "good.cc").write_text("[[deprecated]] int old();\nint good() { return old(); }\n")
    (tmp_path / "bad.h").write_text("int broken() { return undeclared; }\n")
    (tmp_path / "bad.cc").write_text('#include "bad.h"\n')
    (tmp_path / "worse.cc").write_text("int worse() { return 1\n" * 300)
    log = tmp_path / "log"
    command = ["sh", "-c", "cmake -S . -B out && cmake --build out -- -j1"]
    with pytest.raises(BuildFailedError) as caught:
        run_logged("The build", ["env", "-C", str(tmp_path), *command], log, say=print, timeout_s=120)
    text = str(caught.value)
    assert "undeclared" in text and "bad.h:1:23: error" in text and "worse" not in text
    assert f"The full log: {log}" in text and len(text.splitlines()) < 12
    assert "worse" in log.read_text() or "Error" in log.read_text()


def test_a_timeout_kills_the_command_and_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; print('[ 42%]', flush=True); subprocess.run(['sleep', '600'])"
    with pytest.raises(BuildFailedError, match="(?s)The wait did not end within 1 s.*Try again"):
        command = [sys.executable, "-c", code]
        run_logged("The wait", command, tmp_path / "log", say=print, timeout_s=1, do="Try again.")
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=30).stdout
    assert code not in left


def test_variables_and_log_of_a_successful_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    run_logged("It", ["sh", "-c", "echo $A-$HOME-"], log, say=print, timeout_s=60, variables={"A": "b", "HOME": None})
    assert log.read_text() == "before\nb--\n"
