"""Side-by-side timing: runs variants in turn within one run, and prints their ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping


def in_turn(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs every variant once a round, so that a slow moment of the machine affects all of them.

    Args:
        variants: Name -> a call that does the work once and returns the measurement (seconds, say).
        rounds: The number of rounds, after one warm-up round.

    Returns:
        Name -> the measurements, one for each round.
    """
    for run in variants.values():
        run()
    results: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            results[name].append(run())
    return results


def ratio(results: Mapping[str, list[float]], name: str, to: str) -> tuple[float, float, float]:
    """Returns the minimum, median and maximum of `name / to`, round by round."""
    ratios = [a / b for a, b in zip(results[name], results[to])]
    return min(ratios), statistics.median(ratios), max(ratios)


def show(results: Mapping[str, list[float]], to: str, unit: str) -> None:
    """Prints one line for each variant: the median measurement, and its ratio to the variant `to`."""
    for name, values in results.items():
        least, median, most = ratio(results, name, to)
        print(
            f"{name:<28} {statistics.median(values):>10.4f} {unit:<5} "
            f"{median:.3f} x {to} ({least:.3f} to {most:.3f}, {len(values)} rounds)"
        )
