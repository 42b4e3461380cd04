"""Small data sets, the same on every rank and in every process. Plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

WORDS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen")


def make_data(kind: str, rows: int, seed: int = 0) -> tuple[Any, Any]:
    """Returns `rows` rows of inputs and targets of a kind of data.

    Args:
        kind: The name of one of the functions below.
        rows: Number of rows.
        seed: Another seed gives other rows.
    """
    return KINDS[kind](np.random.RandomState(seed), rows)


def take(values: Any, start: int, stop: int) -> Any:
    """Returns rows `start` to `stop` of nested arrays."""
    if isinstance(values, dict):
        return {name: take(value, start, stop) for name, value in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)(take(value, start, stop) for value in values)
    return values[start:stop]


def _numbers(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    x = random.randn(rows, 10).astype("float32")
    return x, (x[:, :3].sum(1, keepdims=True) + 0.1 * random.randn(rows, 1)).astype("float32")


def _binary(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    x = random.randn(rows, 10).astype("float32")
    return x, (x[:, :3].sum(1, keepdims=True) + random.randn(rows, 1) > 0).astype("float32")


def _classes(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    """Returns integer inputs and integer targets."""
    x = random.randint(0, 50, (rows, 7)).astype("int64")
    return x, (x[:, :1] % 4).astype("int32")


def _tokens(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    x = random.randint(0, 50, (rows, 7)).astype("int32")
    return x, (x[:, :1] > 25).astype("float32")


def _padded(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    """Sequences of 1 to 7 tokens, padded with zeros, one target for each token.

    They grow longer from row to row, so the first replica of a batch always holds fewer valid tokens.
    """
    x = random.randint(1, 50, (rows, 7)).astype("int32")
    lengths = 1 + np.arange(rows) % 32 * 7 // 32
    x[np.arange(7)[None] >= lengths[:, None]] = 0
    return x, np.sin(x[..., None] / 5.0).astype("float32")


def _images(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    x = random.randn(rows, 8, 8, 3).astype("float32")
    return x, x.mean((1, 2, 3))[:, None].astype("float32") * 10


def _named(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    x, y = _numbers(random, rows)
    return {"a": x[:, :4], "b": x[:, 4:]}, {"one": y, "two": np.concatenate([y, -y], 1)}


def _nested(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    x, y = _numbers(random, rows)
    return {"left": {"a": x[:, :2], "b": x[:, 2:4]}, "right": (x[:, 4:7], x[:, 7:])}, y


def _strings(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    """Returns a column of words and a column of integers."""
    chosen = random.randint(0, len(WORDS), (rows, 1))
    count = random.randint(0, 5, (rows, 1)).astype("int64")
    return {"word": np.array(WORDS, object)[chosen], "count": count}, (chosen % 3 + count).astype("float32")


def _sentences(random: np.random.RandomState, rows: int) -> tuple[Any, Any]:
    chosen = random.randint(0, len(WORDS), (rows, 4))
    text = np.array([[" ".join(WORDS[i] for i in row)] for row in chosen], object)
    return text, (chosen[:, :1] % 3).astype("float32")


KINDS = {
    "numbers": _numbers,
    "binary": _binary,
    "classes": _classes,
    "tokens": _tokens,
    "padded": _padded,
    "images": _images,
    "named": _named,
    "nested": _nested,
    "strings": _strings,
    "sentences": _sentences,
}
