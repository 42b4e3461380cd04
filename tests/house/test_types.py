"""Type checkers report misspelt names and options of user scripts, and nothing else."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tfdistkit.strategies import factory, overloads
from tfdistkit.strategies.horovod import options as horovod_switches

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "typed_scripts"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    """Returns mypy's errors in the scripts, with the package on the path as if installed: (file, line) -> errors."""
    folder = tmp_path_factory.mktemp("mypy")
    settings = folder / "mypy.ini"
    # TensorFlow and Keras have no types; those of NumPy take most of the time to read.
    libraries = "[mypy-tensorflow.*,keras.*,numpy.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
    settings.write_text(f"[mypy]\n{libraries}")
    command = [sys.executable, "-m", "mypy", f"--config-file={settings}", f"--cache-dir={folder / 'cache'}"]
    run = subprocess.run(
        [*command, "--hide-error-context", "--no-pretty", *sorted(path.name for path in SCRIPTS.glob("*.py"))],
        cwd=SCRIPTS,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    errors: dict[tuple[str, int], str] = {}
    for file, line, error in re.findall(r"^(.+?):(\d+): error: (.*)$", run.stdout, re.MULTILINE):
        key = file, int(line)
        errors[key] = "\n".join([*filter(None, [errors.get(key)]), error])
    return errors


def test_only_misspelt_names_and_options_are_errors(reported: dict[tuple[str, int], str]) -> None:
    expected = {
        (file.name, number): words[1]
        for file in SCRIPTS.glob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if (words := re.search(r"  # error: (.*)$", line))
    }
    assert len(expected) > 25
    assert set(reported) == set(expected), reported
    for place, words in expected.items():
        assert words in reported[place], (place, reported[place])


def signatures() -> dict[str, tuple[set[str], dict[str, str]]]:
    """Returns the overloads of `strategy`: first name -> (all its names, option -> annotation)."""
    tree = ast.parse(Path(overloads.__file__).read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list and not node.args.kwarg:
            names = [name.value for name in ast.walk(node.args.args[0].annotation) if isinstance(name, ast.Constant)]
            options = {one.arg: ast.unparse(one.annotation) for one in node.args.kwonlyargs}
            found[names[0]] = set(names), options
    return found


def test_type_checkers_know_the_names_of_all_strategies() -> None:
    known = signatures()
    assert set(known) == {"auto", *factory._MODULES}
    for name, (spellings, _) in known.items():
        assert spellings == {name} | {alias for alias, target in factory._ALIASES.items() if target == name}


def test_type_checkers_know_the_options_of_all_strategies() -> None:
    known = signatures()
    for name in factory._MODULES:
        assert set(known[name][1]) == set(factory._option_names(name)), name
    of_auto = known["auto"][1]
    assert set(of_auto) == {option for name in factory._CHOSEN_BY_AUTO for option in known[name][1]}
    for name in factory._CHOSEN_BY_AUTO:
        for option, annotation in known[name][1].items():
            assert annotation in of_auto[option], (name, option)


def test_type_checkers_know_the_values_of_options() -> None:
    # Read from the source: importing the module loads TensorFlow.
    source = Path(factory.__file__).with_name("multiworker.py").read_text()
    values = re.search(r"^_COMMUNICATION = (.*)$", source, re.MULTILINE)
    assert values and get_args(overloads.Communication) == ast.literal_eval(values[1])
    assert get_args(overloads.Op) == horovod_switches.OPS
    named = (ROOT / "tfdistkit" / "communication" / "named.py").read_text()
    names = re.search(r"^COMPRESSIONS.* = \{(.*)\}$", named, re.MULTILINE)
    assert names and get_args(overloads.Compression) == tuple(re.findall(r'"(\w+)":', names[1]))
