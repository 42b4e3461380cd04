"""Plain data as YAML, in the form that people write: enough for what Kubernetes reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# A string that no version of YAML takes for anything else, besides the words below.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_WORDS = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))


def to_yaml(value: object) -> str:
    """Writes a value as a YAML document.

    Args:
        value: Mappings with strings as names, sequences, strings, whole numbers, booleans.

    Returns:
        The document, which ends in a newline.
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: object) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for name, part in value.items() for line in _member(f"{_scalar(name)}:", part)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for part in value for line in _item(part)]
    return [_scalar(value)]


def _member(name: str, part: object) -> list[str]:
    lines = _lines(part)
    if not isinstance(part, (Mapping, Sequence)) or isinstance(part, str) or not part:
        return [f"{name} {lines[0]}"]
    return [name, *(f"  {line}" for line in lines)]


def _item(part: object) -> list[str]:
    first, *rest = _lines(part)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else _quoted(value)
    if value in ({}, [], ()):
        return "{}" if isinstance(value, Mapping) else "[]"
    raise TypeError(f"{type(value).__name__} has no place in a manifest")


def _quoted(text: str) -> str:
    """Between single quotes everything is itself; between double ones a backslash escapes, and can give a number."""
    if text.isprintable() and "'" not in text:
        return f"'{text}'"
    known = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(known.get(one) or (one if one.isprintable() else f"\\U{ord(one):08x}") for one in text) + '"'
