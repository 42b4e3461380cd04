"""No module imports itself over others, not even for its types alone."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import tfdistkit

PACKAGE = Path(tfdistkit.__file__).parent


def _modules() -> dict[str, Path]:
    files = PACKAGE.rglob("*.py")
    return {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def _imports(text: str, known: set[str]) -> set[str]:
    """The modules that a text imports anywhere: at its top, in a function, or for types."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name if (name := f"{node.module}.{a.name}") in known else node.module for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found & known


def _circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_imports() -> None:
    modules = _modules()
    # The package itself lists its public names for type checkers, and loads them by name.
    graph = {name: _imports(file.read_text(), {*modules} - {"tfdistkit"}) for name, file in modules.items()}
    del graph["tfdistkit"]
    assert _circle(graph) == []


def test_a_circle_for_types_alone_is_found() -> None:
    known = {"tfdistkit.a", "tfdistkit.b"}
    texts = {
        "tfdistkit.a": "if TYPE_CHECKING:\n    from tfdistkit.b import Thing",
        "tfdistkit.b": "def f():\n    from tfdistkit import a",
    }
    circle = _circle({name: _imports(text, known) for name, text in texts.items()})
    assert set(circle) == known
