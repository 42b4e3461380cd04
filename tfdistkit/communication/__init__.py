"""Gradient all-reduce: the contract of a reducer, and the reducers of the package."""

from tfdistkit.communication.reducer import Reducer, Wire
from tfdistkit.communication.sums import BF16, FP16, Adasum, Average, Sum

__all__ = ["BF16", "FP16", "Adasum", "Average", "Reducer", "Sum", "Wire"]


def __dir__() -> list[str]:
    return sorted(__all__)
