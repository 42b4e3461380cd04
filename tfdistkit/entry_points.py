"""What other packages register with tfdistkit by entry points."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, TypeVar

from tfdistkit.errors import TfdistkitError, explain

Kind = TypeVar("Kind")


@functools.cache
def entry_points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Returns the entry points of a group, without loading them.

    Args:
        group: Such as `tfdistkit.backends`.
    """
    return tuple(importlib.metadata.entry_points(group=group))


def load_any(entry: importlib.metadata.EntryPoint, error_class: type[TfdistkitError]) -> Any:
    """Loads an entry point.

    Args:
        entry: One of `entry_points`.
        error_class: The class of the error.

    Raises:
        TfdistkitError: of `error_class`, if it cannot be loaded; names its package.
    """
    try:
        return entry.load()
    except Exception as error:
        what = f"The entry point {entry.name!r} cannot be loaded: {type(error).__name__}: {error}."
        package = entry.dist.name if entry.dist is not None else "that registers it"
        do = f"Fix or uninstall the package {package} ({entry.value})."
        raise error_class(explain(what, do=do)) from error


def load(entry: importlib.metadata.EntryPoint, kind: type[Kind], error_class: type[TfdistkitError]) -> Kind:
    """Loads an entry point that is an instance of a class.

    Args:
        entry: One of `entry_points`.
        kind: The class of which it must be an instance.
        error_class: The class of the error.

    Raises:
        TfdistkitError: of `error_class`, if it cannot be loaded, or is something else; names its package.
    """
    loaded = load_any(entry, error_class)
    if not isinstance(loaded, kind):
        what = f"The entry point {entry.name!r} must be a {kind.__module__}.{kind.__qualname__}."
        raise error_class(explain(what, received=f"{entry.value}, a {type(loaded).__name__}"))
    return loaded
