"""Estimates what a training step spends on sending, with each compression and algorithm, over a measured link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfdistkit.doctor.findings import Finding, Level
from tfdistkit.doctor.network import Link

TOPIC = "estimates"
# Gradients travel as float32.
_FLOAT_BYTES = 4
# With Adam two numbers of the optimizer travel with each weight when weights are averaged.
_AVERAGED = 3
# The most that sending may add to the computing of a step: a quarter leaves 80 % computing.
_ENOUGH = 0.25
_BLOCK, _SCALES_BYTES = 512, 8
_RANK, _KERNEL = 4, 512
_RATIO, _VALUE_AND_PLACE_BYTES = 0.01, 8


class Choice(NamedTuple):
    """A way to send, and what each step costs with it.

    Args:
        name: Its name.
        option: What to write as an option of the strategy; empty for none.
        size_bytes: The bytes that each worker sends in a step.
        rounds: The messages that wait for each other in a step.
    """

    name: str
    option: str
    size_bytes: float
    rounds: float

    def seconds(self, link: Link) -> float:
        """Returns the seconds of sending in a step.

        Args:
            link: The link.
        """
        return self.size_bytes / link.bytes_per_s + self.rounds * link.round_trip_s / 2


def choices(parameters: int, workers: int) -> list[Choice]:
    """Returns the ways to send, from exact ones to those that change training most.

    Args:
        parameters: The number of weights.
        workers: The number of workers.
    """
    others = workers - 1
    # A ring all-reduce sends each byte twice, without the part of each worker itself.
    exact, ring = 2 * others / workers * _FLOAT_BYTES * parameters, 2 * others
    byte_grad = (1 + _SCALES_BYTES / _BLOCK) / _FLOAT_BYTES
    power_sgd = _RANK * 2 * _KERNEL / _KERNEL**2
    top_k = others * _RATIO * _VALUE_AND_PLACE_BYTES * parameters
    compression, algorithm = "compression=tfdistkit.compression.", "algorithm=tfdistkit.algorithms."
    return [
        Choice("none", "", exact, ring),
        Choice("fp16", 'compression="fp16"', exact / 2, ring),
        Choice("ByteGrad()", f"{compression}ByteGrad()", exact * byte_grad, ring),
        Choice("PowerSGD(4)", f"{compression}PowerSGD(rank=4)", exact * power_sgd, 2 * ring),
        Choice("TopK(0.01)", f"{compression}TopK(0.01)", top_k, others),
        Choice("LocalSGD(100)", f"{algorithm}LocalSGD(every=100)", _AVERAGED * exact / 100, ring / 100),
        Choice("DiLoCo(500)", f"{algorithm}DiLoCo(every=500)", exact / 500, ring / 500),
    ]


def estimate(parameters: int, workers: int, step_s: float, links: Sequence[Link]) -> list[Finding]:
    """Returns what each way to send would reach, and which one to choose.

    Args:
        parameters: The number of weights of the model.
        workers: The number of workers.
        step_s: Seconds that a step computes.
        links: The links between the workers; the slowest counts.
    """
    if not links:
        return []
    slowest = max(links, key=choices(parameters, workers)[0].seconds)
    about = (
        f"{parameters:,} weights, {workers} workers, steps that compute {step_s * 1e3:g} ms; {slowest}\n"
        f"LocalSGD with Adam; PowerSGD for kernels of {_KERNEL} x {_KERNEL}"
    )
    found = [Finding(TOPIC, "for", Level.GOOD, about)]
    for choice in choices(parameters, workers):
        seconds = choice.seconds(slowest)
        percent = 100 * step_s / (step_s + seconds)
        text = f"{_time(seconds):<7} a step to send {_size(choice.size_bytes) + ':':<8} {percent:.0f} % computing"
        found.append(Finding(TOPIC, choice.name, Level.GOOD, text))
    if slowest.is_memory:
        text = "no compression: through shared memory it costs more than it saves"
        return [*found, Finding(TOPIC, "recommended", Level.GOOD, text)]
    return [*found, _recommended(choices(parameters, workers), step_s, slowest)]


def _recommended(ways: Sequence[Choice], step_s: float, link: Link) -> Finding:
    """Recommends the first way that leaves enough computing; without one, that with the least to send."""
    enough = [way for way in ways if way.seconds(link) <= _ENOUGH * step_s]
    # To choose the largest of all numbers takes longer than most steps, so TopK is not recommended.
    chosen = next((way for way in enough if way.name != "TopK(0.01)"), None)
    if chosen is None:
        way = min(ways, key=lambda one: one.seconds(link))
        return Finding(TOPIC, "recommended", Level.NOTE, f"{way.option}: no way leaves 80 % computing", _PAGE)
    if not chosen.option:
        return Finding(TOPIC, "recommended", Level.GOOD, "no compression: the link is fast enough")
    return Finding(TOPIC, "recommended", Level.NOTE, chosen.option, _PAGE)


_PAGE = "docs/communication.md tells what it costs in accuracy"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _size(count: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
