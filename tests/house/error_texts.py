"""Lists the error texts of the package on one page, to be read together: `python tests/house/error_texts.py`.

The page has every call of `errors.explain`: the class of the error, what must hold, and the fix. Parts that depend on
what was received stand in braces.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "error_texts.md"
_HEAD = """# Error texts

Most messages of tfdistkit, by folder and class: what must hold, and the fix. What depends on the case stands in
braces; each message also says what was received. [Errors](errors.md) has the reasons for those that need some.

This page is made by `python tests/house/error_texts.py`.
"""


class Text(NamedTuple):
    """One message.

    Args:
        room: The folder of the package that raises it.
        kind: The class of the error; empty if the text is shown, not raised.
        what: What must hold.
        fix: What to do.
    """

    room: str
    kind: str
    what: str
    fix: str


@functools.cache
def texts() -> list[Text]:
    """Returns the messages of the package, sorted."""
    found: set[Text] = set()
    for file in sorted((ROOT / "tfdistkit").rglob("*.py")):
        room = file.parent.relative_to(ROOT).as_posix()
        found.update(Text(room, *one) for one in _of_module(ast.parse(file.read_text())) if one[1] != "{what}")
    return sorted(found)


def _of_module(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.Module)):
            continue
        known = _assigned(function)
        for node, kind in _calls(function):
            given = {word.arg: word.value for word in node.keywords}
            what = node.args[0] if node.args else given.get("what")
            yield kind, _text(what, known), _text(given.get("do"), known)


def _calls(function: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """The calls of `explain` that stand in a function itself, with the class that takes their text."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.FunctionDef):
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "explain":
            yield child, _name(function)
        yield from _calls(child)


def _name(node: ast.AST) -> str:
    name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    return name if name[:1].isupper() else ""


def _assigned(function: ast.AST) -> dict[str, ast.expr]:
    """The variables that a function, or the module, assigns once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _text(node: ast.expr | None, known: dict[str, ast.expr]) -> str:
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, known) + _text(node.right, known)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (_text(node.body, known), _text(node.orelse, known))))
    if isinstance(node, ast.Name) and isinstance(known.get(node.id), (ast.Constant, ast.JoinedStr, ast.BinOp)):
        return _text(known[node.id], {})
    return "{" + ast.unparse(node) + "}"


def page() -> str:
    """Returns the page."""
    lines, room = [_HEAD], ""
    for text in texts():
        if text.room != room:
            room = text.room
            lines += [f"\n## {room}\n", "| class | message | fix |", "|---|---|---|"]
        cells = (text.kind and f"`{text.kind}`", text.what, text.fix)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}", file=sys.stderr)
