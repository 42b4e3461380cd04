"""The install commands in errors and documents name existing packages, in tested versions."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

from tfdistkit import supported
from tfdistkit.launcher.ray import cluster

ROOT = Path(__file__).parents[2]
ADVISED = [*ROOT.glob("tfdistkit/**/*.py"), *ROOT.glob("examples/**/*.py"), *ROOT.glob("**/*.md")]


def extras() -> dict[str, list[str]]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return {
        name: [line for line in lines.splitlines() if line and not line.startswith("#")]
        for name, lines in config["options.extras_require"].items()
    }


def test_no_command_installs_tfdistkit_from_an_index() -> None:
    pattern = re.compile(r"install[^\n]*?[\s\"'](tfdistkit\[|tfdistkit==|tfdistkit[\"'])")
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in ADVISED
        if not file.relative_to(ROOT).parts[0].startswith(".")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_commands_and_extras_are_equal() -> None:
    cpu = shlex.split(supported.INSTALL_TENSORFLOW)[2:]
    cuda = shlex.split(supported.INSTALL_TENSORFLOW_CUDA)[2:]
    assert (extras()["cpu"], extras()["gpu"]) == (cpu, cuda)
    assert shlex.split(supported.INSTALL_KERAS)[2:] == cpu[1:]
    assert cpu == [f"tensorflow-cpu{bounds(supported.TENSORFLOW)}", f"keras{bounds(supported.KERAS)}"]


def test_the_advice_for_ray_is_its_extra() -> None:
    assert shlex.split(cluster.INSTALL)[2:] == extras()["ray"]


def test_extras_have_upper_bounds() -> None:
    for name in ("cpu", "gpu", "tfds", "ray", "completion", "examples"):
        # importlib_resources is a dependency that tensorflow-datasets does not declare: any version works.
        open_ended = [one for one in extras()[name] if "<" not in one and one != "importlib_resources"]
        assert open_ended == [], name


def test_documents_name_the_same_versions() -> None:
    for name in ("README.md", "docs/errors.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert f"TensorFlow {supported.range_text(supported.TENSORFLOW)}" in text
        assert f"Keras {supported.range_text(supported.KERAS)}" in text


def test_the_quickstart_installs_what_its_script_imports() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    before, _, script = text.partition("```python")
    assert "from sklearn" in script and "pip install '.[cpu]' scikit-learn" in before


def bounds(versions: tuple[tuple[int, int], tuple[int, int]]) -> str:
    lowest, before = (".".join(map(str, one)) for one in versions)
    return f">={lowest},<{before}"
