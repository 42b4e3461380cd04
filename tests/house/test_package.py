"""The published package: a source distribution with everything, a wheel with the package only."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_files import ROOT, files

import tfdistkit

# Folders of the repository, besides the files at its top.
FOLDERS = (".ci", "benchmarks", "docs", "examples", "tests", "tfdistkit")
AT_THE_TOP = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml",
              "setup.cfg", "setup.py"}  # fmt: skip
KEPT = AT_THE_TOP | {str(file.relative_to(ROOT)) for file in files() if file.relative_to(ROOT).parts[0] in FOLDERS}


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the repository, because a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in KEPT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    """Returns a folder with the source distribution, and the wheel built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=checkout)
    return checkout / "dist"


def test_the_distributions_are_valid_for_a_package_index(built: Path) -> None:
    packages = sorted(built.iterdir())
    assert [path.name for path in packages] == [
        f"tfdistkit-{tfdistkit.__version__}-py3-none-any.whl", f"tfdistkit-{tfdistkit.__version__}.tar.gz"
    ]  # fmt: skip
    run(sys.executable, "-m", "twine", "check", "--strict", *packages, cwd=built)


def test_the_source_distribution_has_docs_tests_and_examples(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"docs/quickstart.md", "examples/digits.py", "tests/fuzz/cases/2fd7fc145c.json", "Makefile"} <= KEPT
    assert KEPT <= names, sorted(KEPT - names)
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"tfdistkit", f"tfdistkit-{tfdistkit.__version__}.dist-info"}
    assert {name for name in KEPT if name.startswith("tfdistkit/")} <= names
    assert "tfdistkit/py.typed" in names


def test_the_links_on_a_package_index_are_absolute(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        metadata = email.message_from_bytes(archive.read(f"tfdistkit-{tfdistkit.__version__}.dist-info/METADATA"))
    assert metadata["Author"] and metadata["Description-Content-Type"] == "text/markdown"
    shown = metadata.get_payload()
    assert "## See it work" in shown and "Quickstart" in shown
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert not [link for link in links if not link.startswith("https://")]


def test_the_newest_entry_of_the_changelog_is_of_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+) \((not released|\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    assert newest and newest[1] == tfdistkit.__version__


def test_the_command_that_tags_a_release_names_its_version(checkout: Path) -> None:
    page = (checkout / "CONTRIBUTING.md").read_text()
    command = re.search(r"^(git tag .*?)(?: +#.*)?$", page, re.MULTILINE)
    assert command
    run("git", "init", "--quiet", cwd=checkout)
    run("git", "-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "--quiet", "--allow-empty", "-m", "a",
        cwd=checkout)  # fmt: skip
    settings = f"export GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@localhost PATH={Path(sys.executable).parent}:$PATH"
    run("sh", "-c", f"{settings}; {command[1]}", cwd=checkout)
    assert run("git", "tag", cwd=checkout) == f"v{tfdistkit.__version__}\n"
