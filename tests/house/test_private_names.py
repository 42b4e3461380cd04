"""Private names of Keras and TensorFlow are used in three modules, and every one of them is in a list."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfdistkit

PACKAGE = Path(tfdistkit.__file__).parent
TREES = {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
ADAPTERS = [
    PACKAGE / "keras_adapter" / f"{name}.py" for name in ("private_api", "private_collectives", "private_datasets")
]
NAMES = PACKAGE / "keras_adapter" / "private_names.py"
PRIVATE = re.compile(r"_[a-z]\w*$")
# Of the standard library: the frames of a program, and the groups of a parser that has no other way to name them.
OTHERS = {"_exit", "_getframe", "_current_frames", "_actions", "_action_groups", "_fields"}


@functools.cache
def defined() -> set[str]:
    """What this package defines itself: functions, classes, variables, attributes of `self`."""
    found = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def used(file: Path) -> Iterator[tuple[str, ast.AST | None]]:
    """Private names that a module asks objects for, and the objects; None where it asks by a string."""
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            yield node.attr, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name: Any = node.args[1]
            is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr") and is_text and PRIVATE.match(name.value):
                yield name.value, None


@functools.cache
def listed(*tables: str) -> set[str]:
    """The names in tables of `private_names`, read as text: it loads TensorFlow."""
    found: set[str] = set()
    for node in TREES[NAMES].body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id in tables for target in targets):
            for one in ast.walk(node):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    found |= set(re.findall(r"(?<![A-Za-z0-9])_[a-z]\w*", one.value))
    return found


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda f: f.stem)
def test_the_adapters_list_what_they_use(adapter: Path) -> None:
    own = {node.name for node in ast.walk(TREES[adapter]) if isinstance(node, ast.FunctionDef)}
    known = listed("SEAMS", "ATTRIBUTES", "OWN_ATTRIBUTES") | own
    assert sorted({name for name, _ in used(adapter)} - known) == []


@pytest.mark.parametrize("file", [file for file in TREES if file not in (*ADAPTERS, NAMES)], ids=lambda f: f.stem)
def test_no_other_module_uses_private_names(file: Path) -> None:
    """But methods that it overrides, which are listed, too."""
    overridden, of_ours = listed("OVERRIDES", "ATTRIBUTES", "SEAMS"), defined() | OTHERS
    for name, owner in used(file):
        is_own_class = owner is not None and (_is_self(owner) or _is_super(owner))
        if is_own_class and name in overridden:
            continue
        assert name in of_ours and not (owner is not None and _is_super(owner) and name not in of_ours), (file, name)
