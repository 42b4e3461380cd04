"""Strategies by name: one file for each, loaded when it is asked for."""

from tfdistkit.strategies.factory import register_strategy, strategy

__all__ = ["register_strategy", "strategy"]
