"""Distributed training for Keras 3 on TensorFlow: one command, one line in the script.

```python
import tfdistkit

strategy = tfdistkit.strategy("auto")
with strategy.scope():
    model = ...
    model.compile(...)
model.fit(...)
```

Start it with `tfdistkit run -np 2 train.py`.

Public names are imported on first use, so a launcher, or a script that only calls `tfdistkit.rank()`, never loads
TensorFlow.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` imports the same names lazily
    from tfdistkit import (
        algorithms,
        callbacks,
        cluster,
        collectives,
        communication,
        compression,
        data,
        errors,
        layers,
        strategies,
    )
    from tfdistkit.cluster.detection import is_chief, local_rank, rank, world_size
    from tfdistkit.strategies.factory import register_strategy
    from tfdistkit.strategies.metrics.metric_updates import additive_metric
    from tfdistkit.strategies.overloads import strategy
    from tfdistkit.strategies.sync.custom_steps import global_gradients
    from tfdistkit.supervise.function import launch

__version__ = "0.1.0"

# Public name -> (module, attribute in it; None for the module itself).
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "strategy": ("tfdistkit.strategies.overloads", "strategy"),
    "register_strategy": ("tfdistkit.strategies.factory", "register_strategy"),
    "global_gradients": ("tfdistkit.strategies.sync.custom_steps", "global_gradients"),
    "additive_metric": ("tfdistkit.strategies.metrics.metric_updates", "additive_metric"),
    "launch": ("tfdistkit.supervise.function", "launch"),
    "rank": ("tfdistkit.cluster.detection", "rank"),
    "world_size": ("tfdistkit.cluster.detection", "world_size"),
    "local_rank": ("tfdistkit.cluster.detection", "local_rank"),
    "is_chief": ("tfdistkit.cluster.detection", "is_chief"),
    "algorithms": ("tfdistkit.algorithms", None),
    "callbacks": ("tfdistkit.callbacks", None),
    "cluster": ("tfdistkit.cluster", None),
    "collectives": ("tfdistkit.collectives", None),
    "communication": ("tfdistkit.communication", None),
    "compression": ("tfdistkit.compression", None),
    "data": ("tfdistkit.data", None),
    "errors": ("tfdistkit.errors", None),
    "layers": ("tfdistkit.layers", None),
    "strategies": ("tfdistkit.strategies", None),
}

__all__ = [
    "__version__",
    "additive_metric",
    "algorithms",
    "callbacks",
    "cluster",
    "collectives",
    "communication",
    "compression",
    "data",
    "errors",
    "global_gradients",
    "is_chief",
    "launch",
    "layers",
    "local_rank",
    "rank",
    "register_strategy",
    "strategies",
    "strategy",
    "world_size",
]


def _property(name: str) -> property:
    def get(package: ModuleType) -> Any:
        try:
            return vars(package)[name]
        except KeyError:
            raise AttributeError(name) from None  # Python then calls `__getattr__`

    def put(package: ModuleType, value: Any) -> None:
        vars(package)[name] = value

    def remove(package: ModuleType) -> None:
        del vars(package)[name]

    return property(get, put, remove)


def _by_name(package: ModuleType) -> tuple[Any, tuple[str]]:
    return importlib.import_module, (package.__name__,)


# Completion in Python's shell (`tfdistkit.<TAB>`) evaluates every name that is not a property of the package's type.
# As properties, all names are listed without an import. `__reduce__` pickles the package by name, as any module is, so
# that functions that use it can be sent to workers.
_Package = type("_Package", (ModuleType,), {**{name: _property(name) for name in _PUBLIC}, "__reduce__": _by_name})
sys.modules[__name__].__class__ = _Package


if not TYPE_CHECKING:  # with `__getattr__` in sight, type checkers accept any misspelt name

    def __getattr__(name: str) -> Any:
        """Loads a public name on its first use (PEP 562)."""
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module_name, attribute = _PUBLIC[name]
        module = importlib.import_module(module_name)
        value = module if attribute is None else getattr(module, attribute)
        globals()[name] = value  # cached: the next access skips `__getattr__`
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
