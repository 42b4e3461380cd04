"""Strategies by name: one file for each, loaded when it is asked for."""

from tfdistkit.strategies.factory import StrategyName, register_strategy
from tfdistkit.strategies.overloads import strategy

__all__ = ["StrategyName", "register_strategy", "strategy"]


def __dir__() -> list[str]:
    return sorted(__all__)
