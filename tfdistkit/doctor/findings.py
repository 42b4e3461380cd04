"""Holds findings with their fixes, as plain data, JSON or text."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


class Level(enum.Enum):
    """Rates a finding."""

    GOOD = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check.

    Args:
        topic: One of `versions`, `devices`, `network`, `programs`, `strategies`, `hosts`, `links`,
            `estimates`.
        name: The name of the check.
        level: The rating.
        text: The result as text.
        do: The fix, a command or a step; an empty string if there is nothing to fix.
    """

    topic: str
    name: str
    level: Level
    text: str
    do: str = ""


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Returns findings as dicts for JSON."""
    return [{**asdict(finding), "level": finding.level.value} for finding in findings]


def as_text(findings: Sequence[Finding]) -> str:
    """Returns findings as text by topic, followed by the fixes."""
    lines: list[str] = []
    width = max((len(finding.name) for finding in findings), default=0)
    for topic in dict.fromkeys(finding.topic for finding in findings):
        lines += ["", topic]
        for finding in findings:
            if finding.topic == topic:
                text = finding.text
                if finding.level is Level.NOTE and finding.do:
                    text = f"{text} ({finding.do})"
                first, *rest = text.splitlines() or [""]
                lines.append(f"  {finding.level.value:<8} {finding.name:<{width}}  {first}".rstrip())
                lines += [f"  {'':<8} {'':<{width}}  {line}" for line in rest]
    steps = [finding for finding in findings if finding.do and finding.level in (Level.WARNING, Level.PROBLEM)]
    if steps:
        lines += ["", "what to do"]
        lines += [f"  {finding.name}: {finding.do}" for finding in steps]
    return "\n".join(lines[1:])
