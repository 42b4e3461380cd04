"""The logs of an epoch whose steps ran on workers, which could not read what the coordinator adds up."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def names_of_results(logs: Any, results: list[Any]) -> frozenset[str]:
    """Returns the names in the logs of a step whose values are results of metrics, also of those of a group.

    A step may log a number of its own under the name of a metric: `{"loss": loss, ...}`, where nothing updates the
    metric `loss` of Keras.

    Args:
        logs: The logs of a step that is traced.
        results: What the metrics returned in it.
    """
    known = {id(one) for one in tf.nest.flatten(results)}
    names: set[str] = set()
    for name, value in logs.items() if isinstance(logs, dict) else ():
        if isinstance(value, dict):
            names |= names_of_results(value, results)
        elif id(value) in known:
            names.add(name)
    return frozenset(names)


def with_results(logs: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Returns logs with the results of the metrics that they name, also those of a group (`compile_metrics`)."""
    return {
        name: with_results(value, results) if isinstance(value, dict) else results.get(name, value)
        for name, value in logs.items()
    }
