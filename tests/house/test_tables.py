"""Tables of the documentation have a row for each thing of the code that they list."""

from __future__ import annotations

import ast

import pytest
from test_files import ROOT


def classes(file: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.ClassDef)]


def rows(page: str) -> set[str]:
    """Returns what the first column of the tables of a page names."""
    cells = [line.split("|")[1].strip() for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    return {cell.strip("`").partition("(")[0] for cell in cells}


def hooks() -> list[str]:
    """Returns the hooks of a strategy: as its docstring says, all methods from the first named there to the last."""
    base = next(node for node in classes("tfdistkit/strategies/contract.py") if node.name == "KerasStrategyMixin")
    methods = [node.name for node in base.body if isinstance(node, ast.FunctionDef)]
    between = methods[methods.index("sum_gradients") : methods.index("check_jit_compile") + 1]
    return [name for name in between if not name.startswith("_")]


@pytest.mark.parametrize("hook", hooks())
def test_each_hook_of_a_strategy_is_listed(hook: str) -> None:
    assert hook in rows("docs/extending.md")


@pytest.mark.parametrize(
    "name", [node.name for node in classes("tfdistkit/errors.py") if not node.name.startswith("_")]
)
def test_each_class_of_errors_is_listed(name: str) -> None:
    assert name in rows("docs/errors.md")
