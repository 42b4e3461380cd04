"""The cache of wheels: atomic, one process per build, and no lock that outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tfdistkit import env
from tfdistkit.errors import BuildFailedError
from tfdistkit.horovod_build.wheels import WheelCache

DEADLINE_S = 60


def make(cache: WheelCache, work: Path, text: str = "wheel") -> Path:
    wheel = work / "horovod-0-any.whl"
    wheel.write_text(text)
    return cache.keep("name", wheel, {"from": "a test"})


def test_keeps_and_finds(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    assert cache.find("name") is None
    with cache.alone("name", print, 1) as work:
        assert list(work.iterdir()) == []
        kept = make(cache, work)
    assert cache.find("name") == kept and kept.read_text() == "wheel"
    assert not work.exists()
    assert (kept.parent / "recipe.json").exists()


def test_a_build_that_fails_leaves_no_wheel(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    with pytest.raises(ZeroDivisionError), cache.alone("name", print, 1) as work:
        (work / "horovod-0-half.whl").write_text("ha")
        raise ZeroDivisionError
    assert cache.find("name") is None and not work.exists()


def start(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    code = f"""
from pathlib import Path
from tfdistkit.horovod_build.wheels import WheelCache
cache = WheelCache(Path({str(tmp_path)!r}))
with cache.alone("name", lambda line: print(line, flush=True), {DEADLINE_S}) as work:
    (work / "mine").write_text("x")
    print("inside", flush=True)
{textwrap.indent(textwrap.dedent(body), "    ")}
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_one_at_a_time(tmp_path: Path) -> None:
    body = """
        import sys
        sys.stdin.readline()
        if cache.find("name") is None:
            (work / "a.whl").write_text("made")
            cache.keep("name", work / "a.whl", {})
            print("built", flush=True)
    """
    with start(tmp_path, body) as first:
        assert first.stdout is not None and first.stdout.readline() == "inside\n"
        with start(tmp_path, body) as second:
            assert second.stdout is not None and "waiting for it" in second.stdout.readline()
            assert first.communicate("go\n", timeout=DEADLINE_S)[0] == "built\n"
            assert second.communicate("go\n", timeout=DEADLINE_S)[0] == "inside\n"
    assert (first.returncode, second.returncode) == (0, 0)


def test_the_lock_and_folder_of_a_killed_process_are_reused(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    with start(tmp_path, "input()") as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "inside\n"
        with pytest.raises(BuildFailedError, match="Another process has been building"):
            with cache.alone("name", print, 0.3):
                raise AssertionError("two at once")
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(DEADLINE_S)
    with cache.alone("name", print, DEADLINE_S) as work:
        assert list(work.iterdir()) == []


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "horovod").write_text("a file")
    with pytest.raises(BuildFailedError, match=f"must be writable.*\nName another folder in {env.CACHE_DIR}"):
        with WheelCache(tmp_path).alone("name", print, 1):
            raise AssertionError("not reached")


def test_the_path_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "own"))
    assert WheelCache().folder == tmp_path / "own" / "horovod"
    monkeypatch.delenv(env.CACHE_DIR)
    monkeypatch.setenv(env.XDG_CACHE_HOME, str(tmp_path))
    assert WheelCache().folder == tmp_path / "tfdistkit" / "horovod"
    monkeypatch.delenv(env.XDG_CACHE_HOME)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert WheelCache().folder == tmp_path / ".cache" / "tfdistkit" / "horovod"
