"""Every public name resolves and has a docstring."""

from __future__ import annotations

import ast
import importlib
import itertools
import pickle
import rlcompleter
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

import tfdistkit

PACKAGE = Path(tfdistkit.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in MODULES}


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exports(tree: ast.Module) -> list[str]:
    """Returns the names in a module's `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


EXPORTING = [file for file in MODULES if exports(TREES[file])]
# Packages for user scripts; the other ones are internal to the launcher.
USED_BY_SCRIPTS = (
    "tfdistkit",
    "tfdistkit.callbacks",
    "tfdistkit.cluster",
    "tfdistkit.collectives",
    "tfdistkit.communication",
    "tfdistkit.data",
    "tfdistkit.layers",
    "tfdistkit.strategies",
)
PUBLIC = {name for file in EXPORTING if module_name(file) in USED_BY_SCRIPTS for name in exports(TREES[file])}


def definitions() -> Iterator[tuple[Path, ast.FunctionDef | ast.ClassDef]]:
    for file, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                if "overload" not in map(ast.unparse, node.decorator_list):  # the implementation has the docstring
                    yield file, node


def ids(value: object) -> str:
    return module_name(value) if isinstance(value, Path) else getattr(value, "name", "")


@pytest.mark.tensorflow
@pytest.mark.parametrize("file", EXPORTING, ids=ids)
def test_exports_resolve(file: Path) -> None:
    module = importlib.import_module(module_name(file))
    names = exports(TREES[file])
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(module, name), name
        assert name in dir(module)


def test_completion_lists_the_public_names() -> None:
    complete = rlcompleter.Completer({"tfdistkit": tfdistkit}).complete
    listed = list(itertools.takewhile(bool, (complete("tfdistkit.", number) for number in itertools.count())))
    assert listed == [f"tfdistkit.{name}" for name in sorted(tfdistkit.__all__) if not name.startswith("_")]


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", USED_BY_SCRIPTS)
def test_only_public_names_are_listed(name: str) -> None:
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)


def test_a_public_name_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    original = tfdistkit.rank
    with monkeypatch.context() as replaced:
        replaced.setattr(tfdistkit, "rank", lambda: 7)
        assert tfdistkit.rank() == 7
    assert tfdistkit.rank is original


def test_functions_that_use_the_package_can_be_pickled() -> None:
    sent = cloudpickle.dumps(lambda: (tfdistkit, tfdistkit.rank()))
    assert cloudpickle.loads(sent)() == (tfdistkit, tfdistkit.rank())
    assert pickle.loads(pickle.dumps(tfdistkit)) is tfdistkit


def test_errors_of_an_import_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    # Such as the AttributeError of a TensorFlow with an incompatible NumPy: it is not about a public name.
    def fail(name: str) -> None:
        raise AttributeError("_ARRAY_API not found")

    monkeypatch.delitem(vars(tfdistkit), "launch", raising=False)
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(AttributeError, match="_ARRAY_API not found"):
        _ = tfdistkit.launch


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(tfdistkit, "no_such_name")


@pytest.mark.tensorflow
def test_public_functions_stay_functions_after_submodules_are_imported() -> None:
    for name, (module, attribute) in tfdistkit._PUBLIC.items():
        loaded = importlib.import_module(module)
        expected = loaded if attribute is None else getattr(loaded, attribute)
        assert getattr(tfdistkit, name) is expected
        assert attribute is None or callable(expected)
    assert set(tfdistkit._PUBLIC) == set(tfdistkit.__all__) - {"__version__"}


def test_no_public_function_has_the_name_of_a_module() -> None:
    """Importing a module replaces a function of the same name in its package."""
    rooms = [file for file in MODULES if len(file.relative_to(PACKAGE).parts) < 3 or file.stem == "__init__"]
    modules = {file.stem if file.stem != "__init__" else file.parent.name for file in rooms}
    functions = {node.name for _, node in definitions() if isinstance(node, ast.FunctionDef) and node.name in PUBLIC}
    assert not modules & functions


@pytest.mark.parametrize("file", MODULES, ids=ids)
def test_modules_have_docstrings(file: Path) -> None:
    assert ast.get_docstring(TREES[file])


@pytest.mark.parametrize(("file", "node"), list(definitions()), ids=ids)
def test_docstrings(file: Path, node: ast.FunctionDef | ast.ClassDef) -> None:
    docstring = ast.get_docstring(node)
    assert docstring, f"{file}:{node.lineno}: {node.name} has no docstring"
    assert not docstring.splitlines()[0].startswith(node.name)
    if node.name not in PUBLIC:
        return
    if isinstance(node, ast.FunctionDef):
        if parameters(node):
            assert "Args:" in docstring, f"{node.name} does not explain its arguments"
            for name in parameters(node):
                assert f"{name}:" in docstring, f"{node.name} does not explain `{name}`"
        if node.returns is not None and ast.unparse(node.returns) not in ("None", "NoReturn"):
            assert "Returns:" in docstring, f"{node.name} does not say what it returns"
        return
    for name in fields(node):
        assert f"{name}:" in docstring + (own_init_docstring(node) or ""), f"{node.name} does not explain `{name}`"


def parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in listed if argument.arg not in ("self", "cls")]


def own_init(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)


def own_init_docstring(node: ast.ClassDef) -> str | None:
    init = own_init(node)
    return ast.get_docstring(init) if init else None


def fields(node: ast.ClassDef) -> list[str]:
    """Returns the arguments of a class: those of `__init__`, or the fields of a dataclass."""
    init = own_init(node)
    if init is not None:
        return parameters(init)
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return []
    return [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
