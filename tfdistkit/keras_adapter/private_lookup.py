"""Finds the private names of `private_names` in the installed Keras and TensorFlow, and hooks them."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistkit import supported
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter.private_names import ATTRIBUTES, OVERRIDES, SEAMS, Attributes, Seam


def resolve(key: str) -> tuple[Any, str, Any]:
    """Resolves a seam: a private function, method or property that tfdistkit hooks.

    Args:
        key: A key of `SEAMS`.

    Returns:
        The module or class that holds it, its name there, and the function, method or property itself.

    Raises:
        UnsupportedError: if it does not exist, or no longer takes the parameters that we rely on.
    """
    seam = SEAMS[key]
    module, _, path = seam.where.partition(":")
    *owners, name = path.split(".")
    try:
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        found = getattr(owner, name)
    except (ImportError, AttributeError):
        raise UnsupportedError(_moved(seam, "it is gone")) from None
    if seam.parameters:
        has = inspect.signature(found).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in has.values())
        missing = [p for p in seam.parameters if p not in has and not takes_any]
        if missing:
            raise UnsupportedError(_moved(seam, f"it no longer takes {', '.join(missing)}"))
        # Hooks pass on by position what they get by position.
        order = [p for p in has if p in seam.parameters]
        if order != [p for p in seam.parameters if p in has]:
            raise UnsupportedError(_moved(seam, f"it takes its parameters in another order: {', '.join(order)}"))
    return owner, name, found


def _moved(seam: Seam | Attributes, how: str) -> str:
    return explain(
        f"TensorFlow {tf.__version__} with Keras {keras.__version__} moved `{seam.where}`: {how}. "
        f"tfdistkit needs it: {seam.why}.",
        do=f"Install tested versions: {supported.INSTALL_TENSORFLOW}",
    )


def check() -> None:
    """Checks that every private name exists.

    Raises:
        UnsupportedError: if one is missing or was moved; names the first of them.
    """
    for key in SEAMS:
        resolve(key)
    for attributes in (*ATTRIBUTES, *OVERRIDES):
        require_attributes(attributes)


def require_attributes(attributes: Attributes) -> None:
    """Checks that a class has attributes, in the class itself or in the code of its methods.

    Raises:
        UnsupportedError: if one is missing.
    """
    module, _, path = attributes.where.partition(":")
    try:
        owner = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        raise UnsupportedError(_moved(attributes, "it is gone")) from None
    missing = [name for name in attributes.names if not hasattr(owner, name) and name not in _named_by_methods(owner)]
    if missing:
        raise UnsupportedError(_moved(attributes, f"it has no {', '.join(missing)}"))


@functools.cache
def _named_by_methods(owner: type) -> frozenset[str]:
    """Returns the attribute names in the compiled code of a class; reading sources would take seconds."""
    members = [member for one in owner.__mro__ for member in vars(one).values()]
    codes = [code for member in members for code in _codes(member)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names)


def _codes(member: Any) -> list[types.CodeType]:
    """Returns the code of a method or property, and of what its decorators wrap."""
    parts = (member.fget, member.fset) if isinstance(member, property) else (getattr(member, "__func__", member),)
    codes = []
    for part in parts:
        while part is not None:
            if isinstance(part, types.FunctionType):
                codes.append(part.__code__)
            part = getattr(part, "__wrapped__", None)
    return codes


# Calls functions of the user's that AutoGraph has converted, and that call others, which it must convert, too.
_TRACES_BRANCHES = ("cond",)


def hook(key: str, around: Callable[..., Any]) -> None:
    """Replaces the function, method or property of a seam by `around(original, *args, **kwargs)`."""
    owner, name, original = resolve(key)
    if isinstance(original, property):
        read: Any = original.fget
        setattr(owner, name, property(lambda of: around(read, of), original.fset, original.fdel, original.__doc__))
        return

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    converts = key in _TRACES_BRANCHES
    setattr(owner, name, hooked if converts else tf.autograph.experimental.do_not_convert(hooked))
