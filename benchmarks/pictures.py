"""Draws the pictures of docs/communication.md, as SVG, from what the other benchmarks saved.

Run: python benchmarks/compression.py --tasks digits --save benchmarks/digits.json
     python benchmarks/slow_links.py wide --save benchmarks/wide.json
     python benchmarks/pictures.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_DOCS = _HERE.parent / "docs"
_WIDTH, _LEFT, _RIGHT, _TOP = 720, 190, 30, 50
_ROW, _HEIGHT = 26, 330
# Distinguishable also by those who see no difference between red and green (Okabe and Ito).
_COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7", "#8a7500")
_FONT = 'font-family="sans-serif" font-size="13"'


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {_FONT} {more}>{escape(words)}</text>'


def picture(height: float, title: str, parts: Sequence[str]) -> str:
    """Returns an SVG with a white ground, which a page with a dark one needs."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    ground = f'<title>{escape(title)}</title>\n<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, text(16, 26, title, 'font-weight="bold"'), *parts, "</svg>"]) + "\n"


def bars(title: str, rows: Mapping[str, tuple[float, str]], least: float) -> str:
    """Draws a bar for each row on a logarithmic scale.

    Args:
        title: The title.
        rows: Name -> the value, at most 1, and what stands beside it.
        least: Where the scale begins.
    """
    wide = _WIDTH - _LEFT - _RIGHT - 200
    parts = []
    for number, (name, (value, beside)) in enumerate(rows.items()):
        y, length = _TOP + number * _ROW, max(2.0, wide * (1 - math.log(value) / math.log(least)))
        parts += [
            text(_LEFT - 10, y + 14, name, 'text-anchor="end"'),
            f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_ROW - 8}" fill="{_COLOURS[4]}"/>',
            text(_LEFT + length + 8, y + 14, beside),
        ]
    return picture(_TOP + len(rows) * _ROW + 16, title, parts)


def lines(title: str, curves: Mapping[str, Sequence[Sequence[float]]], below: str, is_log_x: bool) -> str:
    """Draws a line for each curve; the losses are on a logarithmic scale.

    Args:
        title: The title.
        curves: Name -> points.
        below: What the x-axis has.
        is_log_x: Whether the x-axis is logarithmic, too.
    """
    points = [point for curve in curves.values() for point in curve]
    across = math.log if is_log_x else float
    x_low, x_high = min(across(x) for x, _ in points), max(across(x) for x, _ in points)
    y_low, y_high = min(math.log(y) for _, y in points), max(math.log(y) for _, y in points)
    left, bottom, wide, high = 70, _HEIGHT - 50, _WIDTH - 70 - 170, _HEIGHT - 50 - _TOP

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + wide * (across(x) - x_low) / max(x_high - x_low, 1e-9),
            bottom - high * (math.log(y) - y_low) / max(y_high - y_low, 1e-9),
        )

    parts = [f'<path d="M{left},{_TOP} V{bottom} H{left + wide}" fill="none" stroke="#888888"/>']
    for value in ticks(math.exp(y_low), math.exp(y_high)):
        y = at(points[0][0], value)[1]
        parts.append(text(left - 8, y + 4, f"{value:g}", 'text-anchor="end"'))
        parts.append(f'<path d="M{left},{y:.1f} H{left + wide}" stroke="#dddddd"/>')
    xs = ticks(math.exp(x_low), math.exp(x_high)) if is_log_x else [x_low, x_high]
    parts += [text(at(x, 1.0)[0], bottom + 18, f"{x:g}", 'text-anchor="middle"') for x in xs]
    parts.append(text(left + wide / 2, bottom + 38, below, 'text-anchor="middle"'))
    for number, (name, curve) in enumerate(curves.items()):
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in curve)
        colour, y = _COLOURS[number % len(_COLOURS)], _TOP + 10 + number * 20
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in (at(*one) for one in curve)),
            f'<rect x="{_WIDTH - 155}" y="{y - 8}" width="12" height="12" fill="{colour}"/>',
            text(_WIDTH - 137, y + 3, name),
        ]
    return picture(_HEIGHT, title, parts)


def ticks(low: float, high: float) -> list[float]:
    """Returns round numbers between two."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]


def read(name: str) -> Any:
    return json.loads((_HERE / name).read_text(encoding="utf-8"))


def main() -> None:
    digits = read("digits.json")["digits"]
    rows = {
        name: (found["bytes"], f"{found['bytes']:.3g} of the bytes, accuracy {found['accuracy']:.3f}")
        for name, found in digits.items()
    }
    least = min(value for value, _ in rows.values()) / 2
    (_DOCS / "bytes.svg").write_text(
        bars("Bytes that a worker sends, to none (digits; a logarithmic scale)", rows, least)
    )
    curves = {name: [[i + 1, y] for i, y in enumerate(found["curve"])] for name, found in digits.items()}
    (_DOCS / "loss.svg").write_text(lines("Loss of training (digits, two workers)", curves, "epoch", False))
    if (_HERE / "wide.json").exists():
        wide = read("wide.json")
        title = f"Loss on held-out rows over a link of {wide['rate'][:-4]} {wide['rate'][-4].upper()}bit/s, 25M weights"
        (_DOCS / "slow_link.svg").write_text(lines(title, wide["curves"], "seconds", True))


if __name__ == "__main__":
    main()
