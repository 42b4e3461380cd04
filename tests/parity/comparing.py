"""Reads the records of the engines, and measures the difference of two records. Plain numpy."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

# Differences are relative to the size of the number; below this, to this.
SMALLEST_SIZE = 1e-3

# Values with a list of numbers for each logged name.
CURVES = ("history", "evaluate", "resumed", "other_resumed", "batches", "test_batches", "results", "values")


@dataclass(frozen=True)
class Recorded:
    """The record of a case of one rank.

    Args:
        values: The json: logs, paths of variables, an error.
        arrays: Weights, state of optimizers, predictions, by group and number.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def error(self) -> str | None:
        """The error that ended the case."""
        return self.values.get("error")

    def path(self, name: str) -> str:
        """The Keras path of the variable that an array holds."""
        group, _, number = name.partition(".")
        paths = self.values.get(f"{group}_paths")
        return f"{name} {paths[int(number)]}" if paths else name


def load(folder: str, case: str, rank: int) -> Recorded:
    """Reads the record of a case of one rank."""
    start = os.path.join(folder, f"{case}.{rank}")
    with open(f"{start}.json") as file, np.load(f"{start}.npz") as arrays:
        return Recorded(json.load(file), dict(arrays))


def of_numbers(expected: Any, found: Any) -> float:
    """The largest relative difference of two curves."""
    expected, found = np.asarray(expected, "float64"), np.asarray(found, "float64")
    if expected.shape != found.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.max(np.abs(expected - found) / np.maximum(np.abs(expected), SMALLEST_SIZE)))


def of_tensors(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest difference of two tensors, relative to the largest number in the expected one."""
    if expected.shape != found.shape or not np.isfinite(found).all():
        return float("inf")
    if not expected.size:
        return 0.0
    size = max(float(np.max(np.abs(expected))), SMALLEST_SIZE)
    return float(np.max(np.abs(expected.astype("float64") - found))) / size


def differences(expected: Recorded, found: Recorded) -> dict[str, float]:
    """Returns by name the difference of each recorded value from the expected one; infinity for a missing value."""
    result = {}
    for group in CURVES:
        for name, curve in expected.values.get(group, {}).items():
            result[f"{group} {name}"] = of_numbers(curve, found.values.get(group, {}).get(name, []))
    for name, tensor in expected.arrays.items():
        result[expected.path(name)] = of_tensors(tensor, found.arrays.get(name, np.zeros((0, 0, 0))))
    return result


def rank_differences(ranks: list[Recorded]) -> list[str]:
    """Returns the names of values that are not bitwise equal on all ranks."""
    first = ranks[0]
    names = [group for group in CURVES if any(r.values.get(group) != first.values.get(group) for r in ranks)]
    for name, tensor in first.arrays.items():
        if any(name not in r.arrays or r.arrays[name].tobytes() != tensor.tobytes() for r in ranks):
            names.append(first.path(name))
    return names
