"""`tfdistkit horovod install` takes only pinned files from a package index."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from tfdistkit.errors import BuildFailedError
from tfdistkit.horovod_build import pinned, recipe
from tfdistkit.horovod_build.installing import BuildPlan, make_wheel, plan_text
from tfdistkit.horovod_build.recipe import BuildOptions, Machine
from tfdistkit.horovod_build.target import Target
from tfdistkit.horovod_build.wheels import WheelCache


def plan(*packages: str) -> BuildPlan:
    """For this Python, which has these packages."""
    target = Target(
        *(sys.executable, "3.11.7", "cp311", "linux_x86_64", "glibc-2.36", "/env/bin"),
        *(True, packages, "2.21.0", (), "/env/include"),
    )
    return BuildPlan(target, BuildOptions(), Machine("", (), 1, 1), {}, "name")


@pytest.fixture
def cache(tmp_path: Path) -> WheelCache:
    """With the wheel in it, so that only Horovod's own requirements are missing."""
    made = WheelCache(tmp_path / "cache")
    with made.alone("name", print, 10) as work:
        (work / "horovod-0-any.whl").touch()
        made.keep("name", work / "horovod-0-any.whl", {})
    return made


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index, and a folder into which pip installs."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "TARGET": str(tmp_path / "installed")}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def forge(index: Path, version: str) -> None:
    with zipfile.ZipFile(index / f"cloudpickle-{version}-py3-none-any.whl", "w") as wheel:
        folder = f"cloudpickle-{version}.dist-info"
        wheel.writestr("cloudpickle.py", "raise SystemExit('it ran')\n")
        wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: cloudpickle\nVersion: {version}\n")
        wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{folder}/RECORD", "")


@pytest.mark.parametrize("version", [pinned.PINS["cloudpickle"].version, "99.0"])
def test_forged_packages_are_not_installed(version: str, cache: WheelCache, index: Path, tmp_path: Path) -> None:
    """The same version with other contents, and one that is newer."""
    forge(index, version)
    with pytest.raises(BuildFailedError, match="The installation of cloudpickle==") as caught:
        make_wheel(plan("packaging", "psutil", "PyYAML"), cache, print)
    assert "install versions that you trust, and try again" in str(caught.value)
    assert not (tmp_path / "installed").exists()


def test_installed_packages_are_not_installed_again(cache: WheelCache, index: Path) -> None:
    wheel = make_wheel(plan("packaging", "psutil", "PyYAML", "cloudpickle"), cache, print)
    assert wheel.name == "horovod-0-any.whl"


def test_all_installed_packages_are_pinned(cache: WheelCache) -> None:
    assert set(recipe.RUN_PACKAGES) <= set(recipe.BUILD_PACKAGES) == set(pinned.PINS)
    lines = pinned.requirements(recipe.BUILD_PACKAGES).splitlines()
    assert len(lines) == len(recipe.BUILD_PACKAGES)
    assert all(re.fullmatch(r"\w+==[\d.]+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines), lines
    # Pythons 3.10 to 3.13 on two kinds of machine.
    assert [len(pinned.PINS[name].sha256) for name in ("psutil", "PyYAML")] == [2, 8]
    text = plan_text(plan(), cache)
    assert "install   cloudpickle==3.1.2, checksum pinned\n" in text
    assert " --require-hashes --requirement <packages.txt>" in text
