"""Entry points without an installed package."""

from __future__ import annotations


class EntryPoint:
    """Loads what it was made with, or raises it."""

    dist = None

    def __init__(self, name: str, loaded: object):
        self.name, self.value, self._loaded = name, "package.module:NAME", loaded

    def load(self) -> object:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded
