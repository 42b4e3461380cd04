"""Strategies by name: one module for each, imported on first use."""

from tfdistkit.strategies.factory import StrategyName, register_strategy
from tfdistkit.strategies.overloads import strategy

__all__ = ["StrategyName", "register_strategy", "strategy"]


def __dir__() -> list[str]:
    return sorted(__all__)
