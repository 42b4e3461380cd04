"""`tfdistkit horovod` in real environments: without TensorFlow, and with a Horovod that does not load."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tfdistkit.cli.horovod import main
from tfdistkit.horovod_build.checking import HorovodStatus, status_text


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python without TensorFlow and without pip."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def fake_horovod(folder: Path, body: str) -> None:
    """A Horovod whose loading comes out as wanted, and a TensorFlow of which it is sure."""
    package = folder / "horovod" / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(body)
    (folder / "horovod" / "__init__.py").write_text("")
    (folder / "horovod" / "metadata.json").write_text(json.dumps({"tensorflow": "2.20.0", "dummy": "none"}))
    (folder / "tensorflow.py").write_text("__version__ = '2.21.0'\n")


def test_check_without_horovod(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--python", bare]) == 1
    assert "Horovod is not installed" in (output := capsys.readouterr().out)
    assert output.splitlines()[-1] == "Build and install it: tfdistkit horovod install"


def test_check_of_a_horovod_that_does_not_load(bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_horovod(tmp_path, "raise ImportError('undefined symbol: _ZN3abc')")
    assert main(["check", "--python", bare]) == 1
    output = capsys.readouterr().out
    assert "built against  TensorFlow 2.20.0 (installed is 2.21.0)" in output
    assert "loads          no: ImportError: undefined symbol: _ZN3abc" in output
    assert output.splitlines()[-1] == "Build it again: tfdistkit horovod install"


def test_check_of_a_horovod_that_crashes(bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_horovod(tmp_path, "import os; os.abort()")
    assert main(["check", "--python", bare]) == 1
    assert "killed by SIGABRT" in capsys.readouterr().out


def test_check_of_a_horovod_that_loads(bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = "gloo_built = mpi_built = lambda: True\nnccl_built = lambda: 0\nprint('noise')"
    fake_horovod(tmp_path, built)
    assert main(["check", "--python", bare]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[1:] == [["loads", "yes"], ["gloo", "yes"], ["mpi", "yes"], ["nccl", "no"]]


def test_install_without_tensorflow(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", "--python", bare]) == 1
    output = capsys.readouterr().err
    assert (
        "TensorFlow must be installed to build Horovod" in output
        and f"{bare} -m pip install 'tensorflow-cpu>=2.18" in output
    )


@pytest.mark.parametrize("action", ["check", "install"])
def test_a_missing_python_is_reported(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([action, "--python", "/no/such/python"]) == 1
    assert "/no/such/python did not answer" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["remove"], ["install", "--with-mpi", "--without-mpi"], ["check", "--nccl"]])
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_status_of_an_unknown_build() -> None:
    status = HorovodStatus("3.11.7", "0.28.1", "", "", False, False, False, "ImportError: no")
    assert "an unknown TensorFlow (installed is none that loads)" in status_text(status, "python")


def test_help_is_light() -> None:
    code = (
        "import sys\nfrom tfdistkit.cli.horovod import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'tensorflow', 'numpy', 'horovod'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
