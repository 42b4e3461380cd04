"""Import modules that were sent as source text: the first code that an agent runs on its host."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType


class SentModules:
    """Finds and loads modules from sent sources.

    Args:
        sources: Full name -> source; their parent packages are created empty.
    """

    def __init__(self, sources: Mapping[str, str]):
        self._sources = dict(sources)
        self._packages = {name.rsplit(".", depth)[0] for name in sources for depth in range(1, name.count(".") + 1)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of Python's import: see `importlib.abc.MetaPathFinder`."""
        if name not in self._packages and name not in self._sources:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name in self._packages)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Part of Python's import: see `importlib.abc.Loader`."""

    def exec_module(self, module: ModuleType) -> None:
        """Part of Python's import: see `importlib.abc.Loader`."""
        source = self._sources.get(module.__name__, "")
        exec(compile(source, f"<sent>/{module.__name__}", "exec", dont_inherit=True), vars(module))  # noqa: S102


def run_sent(sources: Mapping[str, str], name: str, mark: str) -> None:
    """Imports a sent module, and calls its function `run`.

    Args:
        sources: Full name -> source.
        name: The module.
        mark: The argument of `run`.
    """
    sys.meta_path.insert(0, SentModules(sources))
    importlib.import_module(name).run(mark)
