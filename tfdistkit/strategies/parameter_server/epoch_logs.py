"""The logs of an epoch whose steps ran on workers, which could not read what the coordinator adds up."""

from __future__ import annotations

from typing import Any


def with_results(logs: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Returns logs with the results of the metrics that they name, also those of a group (`compile_metrics`)."""
    return {
        name: with_results(value, results) if isinstance(value, dict) else results.get(name, value)
        for name, value in logs.items()
    }
