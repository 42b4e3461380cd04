"""The inputs and the expected results of each collective, computed by NumPy for all ranks at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Inputs:
    """The tensors of `n` ranks, one for each."""

    even: Arrays
    odd: Arrays
    uneven: Arrays
    across: Arrays
    splits: list[list[int]]
    rows: Arrays


@functools.cache
def inputs(n: int) -> Inputs:
    """Returns the inputs for a number of ranks, the same in every process."""
    numbers = np.random.default_rng(7)
    splits = [[(r + to) % 3 for to in range(n)] for r in range(n)]
    return Inputs(
        even=[numbers.normal(size=(3 * n, 2)) for _ in range(n)],
        odd=[numbers.normal(size=(n + 2, 2)) for _ in range(n)],
        uneven=[numbers.normal(size=(2 + r, 3)) for r in range(n)],
        across=[numbers.normal(size=(2, 4 - r)) for r in range(n)],
        splits=splits,
        rows=[numbers.normal(size=(sum(s), 2)) for s in splits],
    )


def weights(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the weights of a rank's result in its loss."""
    return np.random.default_rng(rank).normal(size=shape)


def _same(function: Callable[[Arrays], np.ndarray]) -> Callable[[Arrays], Arrays]:
    return lambda xs: [function(xs)] * len(xs)


def _parts(function: Callable[[Arrays], np.ndarray]) -> Callable[[Arrays], Arrays]:
    return lambda xs: np.array_split(function(xs), len(xs))


def _send(xs: Arrays, splits: list[list[int]]) -> Arrays:
    pieces = [np.split(x, np.cumsum(s)[:-1]) for x, s in zip(xs, splits)]
    return [np.concatenate([pieces[r][to] for r in range(len(xs))]) for to in range(len(xs))]


# Case -> the name of the input, and the results of all ranks.
CASES: dict[str, tuple[str, Callable[[Arrays], Arrays]]] = {
    "sum": ("even", _same(sum)),
    "average": ("even", _same(lambda xs: sum(xs) / len(xs))),
    "min": ("even", _same(np.minimum.reduce)),
    "max": ("even", _same(np.maximum.reduce)),
    "group": ("even", _same(lambda xs: sum(xs) + 2 * sum(xs)[0])),
    "gather": ("uneven", _same(np.concatenate)),
    "gather_last": ("across", _same(lambda xs: np.concatenate(xs, 1))),
    "broadcast": ("even", _same(lambda xs: xs[-1])),
    "scatter": ("odd", _parts(sum)),
    "scatter_average": ("odd", _parts(lambda xs: sum(xs) / len(xs))),
    "scatter_max": ("odd", _parts(np.maximum.reduce)),
    "to_all": ("even", lambda xs: _send(xs, [[3] * len(xs)] * len(xs))),
    "to_all_uneven": ("rows", lambda xs: _send(xs, inputs(len(xs)).splits)),
}


@functools.cache
def expected(case: str, n: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the result on a rank, and the gradient of the sum of all ranks' losses by its input."""
    field, reference = CASES[case]
    xs = getattr(inputs(n), field)
    gradient = np.zeros_like(xs[rank])
    for place in np.ndindex(gradient.shape):
        for sign in (1, -1):
            moved = [x.copy() for x in xs]
            moved[rank][place] += sign * 1e-4
            losses = [(weights(r, y.shape) * y).sum() for r, y in enumerate(reference(moved))]
            gradient[place] += sign * sum(losses) / 2e-4
    return reference(xs)[rank], gradient
