"""A script behaves under `tfdistkit.worker` as under plain `python`: both are compared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipapp
from pathlib import Path

import pytest

from tfdistkit import env
from tfdistkit.report import read_crash

LOOK = """
    'The docstring.'
    import json, sys
    x: int = 1
    known = {name: repr(value) for name, value in globals().items()}
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "rest": sys.path[1:], "file": __file__, "name": __name__,
        "doc": __doc__, "package": __package__, "spec": repr(__spec__), "cached": __cached__,
        "loader": type(__loader__).__name__, "annotations": repr(__annotations__), "globals": sorted(known),
        "builtins": repr(__builtins__), "main": sys.modules["__main__"].__dict__ is globals(), "flags": repr(sys.flags),
    }))
"""

# The address of an object.
ADDRESS = r"0x[0-9a-f]+"

SCRIPTS = {
    "looks around": LOOK,
    "pickles its own class": """
        import atexit, pickle
        class Point:
            def __init__(self, x): self.x = x
        data = pickle.dumps(Point(3))
        print(b"__main__" in data, pickle.loads(data).x)
        atexit.register(lambda: print(pickle.loads(pickle.dumps(Point(4))).x, type(pickle.loads(data))))
    """,
    "spawns processes": """
        import multiprocessing
        def double(x): return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2, 3]))
    """,
    "goes on in a thread": """
        import threading, time
        word = "still here"
        def later():
            time.sleep(0.2)
            import __main__
            print(word, __main__.word)
        threading.Thread(target=later).start()
    """,
    "raises": """
        def inner():
            raise ValueError("wrong\\nand more")
        def outer():
            inner()
        outer()
    """,
    "raises from another": """
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("second") from error
    """,
    "raises a group": """
        import sys
        if sys.version_info >= (3, 11):
            raise ExceptionGroup("several", [ValueError(1), TypeError(2)])
    """,
    "cannot be compiled": "x = = 1\n",
    "cannot be indented": "if True:\npass\n",
    "is no text": "x = '\\udcff'.encode('utf-8', 'surrogateescape'); print(x)\n",
    "imports what is not there": "import no_such_module_here\n",
    "exits with a number": "import sys; sys.exit(3)\n",
    "exits with a large number": "import sys; sys.exit(257)\n",
    "exits with a negative number": "import sys; sys.exit(-1)\n",
    "exits with zero": "import sys; sys.exit(0)\n",
    "exits with nothing": "import sys; sys.exit()\n",
    "exits with a message": "import sys; sys.exit('because')\n",
    "exits with an object": "import sys; sys.exit(['a', 1])\n",
    "exits at once": "import os; os._exit(5)\n",
    "has a hook of its own": """
        import sys
        sys.excepthook = lambda kind, error, tb: print("hook", kind.__name__, tb.tb_frame.f_code.co_name)
        raise ValueError
    """,
    "has a broken exception": """
        class Broken(Exception):
            def __str__(self): raise TypeError
        raise Broken
    """,
    "is interrupted": "raise KeyboardInterrupt\n",
    "is killed": "import os; os.kill(os.getpid(), 15)\n",
    "says goodbye": """
        import atexit
        atexit.register(print, "goodbye")
        raise ValueError("hello")
    """,
    "uses dataclasses and string annotations": """
        from __future__ import annotations
        import dataclasses, typing
        @dataclasses.dataclass
        class Node:
            next: Node | None = None
        print(typing.get_type_hints(Node))
    """,
}


def run(command: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def compare(words: list[str], cwd: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    plain = run([*flags, *words], cwd)
    ours = run([*flags, "-m", "tfdistkit.worker", *words], cwd)
    assert re.sub(ADDRESS, "", ours.stdout) == re.sub(ADDRESS, "", plain.stdout)
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode
    return ours


# What each rank keeps for `tfdistkit ps` and `stacks` while it runs.
_NOTES = ["progress", "stacks"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_as_under_plain_python(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPTS[name]), encoding="utf-8")
    compare(["script.py", "one", "--two", "-m", "--"], tmp_path)


@pytest.mark.parametrize("way", ["script.py", "./script.py", "../{here}/script.py", "sub/../script.py", "{absolute}"])
def test_however_the_script_is_named(tmp_path: Path, way: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "script.py").write_text(textwrap.dedent(LOOK), encoding="utf-8")
    ended = compare([way.format(here=tmp_path.name, absolute=tmp_path / "script.py")], tmp_path)
    assert json.loads(ended.stdout)["path"] == str(tmp_path)


def test_a_link_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text(textwrap.dedent(LOOK), encoding="utf-8")
    (tmp_path / "link.py").symlink_to("real/script.py")
    ended = compare(["link.py"], tmp_path)
    assert json.loads(ended.stdout)["path"] == str(tmp_path / "real")


def test_without_the_scripts_folder_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(LOOK), encoding="utf-8")
    # `python -P` exists since Python 3.11; before, the script's folder is always on the path.
    compare(["script.py"], tmp_path, *(["-P"] if sys.version_info >= (3, 11) else []))


def test_modules_of_python_are_not_taken_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(textwrap.dedent(LOOK), encoding="utf-8")
    for name in ("signal", "copy", "struct", "hashlib", "inspect", "shutil", "tempfile", "threading", "logging"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit({name!r})")
    compare(["folder/script.py"], tmp_path)


def program(folder: Path, kind: str, text: str) -> str:
    """Makes a folder with a `__main__.py`, or a zip file of it, and returns its name."""
    (folder / "program").mkdir()
    (folder / "program" / "__main__.py").write_text(textwrap.dedent(text), encoding="utf-8")
    (folder / "program" / "beside.py").write_text("name = __name__\n")
    if kind == "folder":
        return "program"
    zipapp.create_archive(folder / "program", folder / f"program{kind}")
    return f"program{kind}"


@pytest.mark.parametrize("flags", [(), ("-P",)], ids=["plain", "safe-path"])
@pytest.mark.parametrize("kind", ["folder", ".pyz", ".py"])
def test_a_folder_and_a_zip_file(tmp_path: Path, kind: str, flags: tuple[str, ...]) -> None:
    if flags and sys.version_info < (3, 11):
        flags = ()
    name = program(tmp_path, kind, "import beside\n" + textwrap.dedent(LOOK))
    for way in (name, f"./{name}", str(tmp_path / name)):
        ended = compare([way, "one", "-m", "--"], tmp_path, *flags)
        assert json.loads(ended.stdout)["argv"] == [way, "one", "-m", "--"]
    (tmp_path / "link").symlink_to(name)
    compare(["link"], tmp_path, *flags)


@pytest.mark.parametrize("kind", ["folder", ".pyz"])
@pytest.mark.parametrize("name", ["pickles its own class", "exits with a number", "is killed"])
def test_what_a_zip_file_does(tmp_path: Path, kind: str, name: str) -> None:
    compare([program(tmp_path, kind, SCRIPTS[name])], tmp_path)


def test_a_zip_file_that_raises(tmp_path: Path) -> None:
    ended = run(["-m", "tfdistkit.worker", program(tmp_path, ".pyz", SCRIPTS["raises"])], tmp_path)
    assert ended.returncode == 1 and ended.stderr.startswith("Traceback (most recent call last):\n")
    assert 'program.pyz/__main__.py", line 6' in ended.stderr and "worker.py" not in ended.stderr


def test_a_folder_without_a_main(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    compare(["empty"], tmp_path)


@pytest.mark.parametrize("way", ["script.py", "program", "program.pyz"])
def test_the_working_directory_may_change(tmp_path: Path, way: str) -> None:
    text = """
        import os, sys
        os.chdir("elsewhere")
        import multiprocessing
        def where(_): return os.path.basename(__file__)
        if __name__ == "__main__":
            print(sys.argv[0], __file__, sys.path[0])
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(abs, [-1]))
            import beside
            print(beside.name)
    """
    (tmp_path / "elsewhere").mkdir()
    program(tmp_path, ".pyz", text)
    (tmp_path / "script.py").write_text(textwrap.dedent(text), encoding="utf-8")
    (tmp_path / "beside.py").write_text("name = __name__\n")
    # Also the folder in which child processes of the script start.
    (tmp_path / "elsewhere" / "elsewhere").mkdir()
    compare([way], tmp_path)


@pytest.mark.parametrize("module", ["package.part", "package", "single"])
def test_a_module(tmp_path: Path, module: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import sys; print(sys.argv)\n")
    for name in ("package/part.py", "package/__main__.py", "single.py"):
        (tmp_path / name).write_text(textwrap.dedent(LOOK), encoding="utf-8")
    compare(["-m", module, "--x"], tmp_path)


def test_a_module_in_a_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / program(tmp_path, ".pyz", "")), *sys.path]))
    ended = compare(["-m", "beside"], tmp_path)
    assert ended.returncode == 0


@pytest.mark.parametrize("module", ["no_such_module_here", "json.no_such_part"])
def test_a_missing_module(tmp_path: Path, module: str) -> None:
    compare(["-m", module], tmp_path)


def test_a_module_that_spawns_processes(tmp_path: Path) -> None:
    (tmp_path / "single.py").write_text(textwrap.dedent(SCRIPTS["spawns processes"]), encoding="utf-8")
    compare(["-m", "single"], tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("raises", "ValueError", 1),
        ("cannot be compiled", "SyntaxError", 1),
        ("exits with a number", "SystemExit", 3),
        ("exits with a large number", "SystemExit", 1),
        ("exits with a negative number", "SystemExit", 255),
        ("exits with a message", "SystemExit", 1),
        ("has a broken exception", "Broken", 1),
        ("is interrupted", "KeyboardInterrupt", 130),
    ],
)
def test_the_crash_record(tmp_path: Path, name: str, kind: str, code: int) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPTS[name]), encoding="utf-8")
    (tmp_path / "rank.1").mkdir()
    words = ["-m", "tfdistkit.worker", "script.py"]
    ended = run(words, tmp_path, **{env.TASK_DIR: str(tmp_path / "rank.1"), env.RANK: "1"})
    record = read_crash(tmp_path / "rank.1")
    assert record is not None
    assert (record.rank, record.type, record.exit_code) == (1, kind, code)
    assert ended.returncode == (-signal.SIGINT if code == 130 else code)
    if kind.endswith("Error"):
        assert record.traceback == ended.stderr
    assert sorted(path.name for path in (tmp_path / "rank.1").iterdir()) == ["error.json", *_NOTES]


@pytest.mark.parametrize("name", ["looks around", "exits with zero", "exits with nothing"])
def test_no_crash_record_after_a_success(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPTS[name]), encoding="utf-8")
    (tmp_path / "rank.1").mkdir()
    run(["-m", "tfdistkit.worker", "script.py"], tmp_path, **{env.TASK_DIR: str(tmp_path / "rank.1"), env.RANK: "1"})
    assert sorted(path.name for path in (tmp_path / "rank.1").iterdir()) == _NOTES


def test_a_worker_whose_launcher_is_gone_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')", encoding="utf-8")
    ended = run(["-m", "tfdistkit.worker", "script.py"], tmp_path, **{env.PARENT_PID: "1"})
    assert (ended.returncode, ended.stdout) == (137, "")
