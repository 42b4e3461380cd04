"""What is wrong with a call that `tfdistkit.launch` is to make in the workers: told before any of them is started."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from tfdistkit.errors import OptionError, explain

_LONGEST_SHOWN = 60


def check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Checks that a function can be called with arguments.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its named arguments.

    Raises:
        OptionError: if it cannot.
    """
    if not callable(fn):
        is_script = isinstance(fn, str) and fn.endswith((".py", ".pyz"))
        do = "Give the function itself, without calling it: tfdistkit.launch(train, args=(0.1,), np=2)"
        do = f"For a script, type: tfdistkit run -np 2 {fn}" if is_script else do
        raise OptionError(explain("`fn` is not a function.", received=_shown(fn), expected="a function to call", do=do))
    name = getattr(fn, "__name__", "fn")
    name = name if name.isidentifier() else "fn"
    if isinstance(args, Mapping):
        raise _wrong_args(args, f"Give named arguments as `kwargs`: tfdistkit.launch({name}, kwargs={_shown(args)})")
    if isinstance(args, int) and not isinstance(args, bool):
        workers = f"For {args} workers: tfdistkit.launch({name}, np={args})" if args > 0 else ""
        one = f"For the argument {args}: tfdistkit.launch({name}, ({args},))"
        raise _wrong_args(args, "\n".join(filter(None, [workers, one])))
    if isinstance(args, (str, bytes, bytearray)) or not isinstance(args, Sequence):
        short = _shown(args) if len(_shown(args)) <= _LONGEST_SHOWN // 2 else "value"
        raise _wrong_args(args, f"Put a single argument into a tuple: tfdistkit.launch({name}, ({short},))")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        expected = "a dict of named arguments, such as {'epochs': 3}"
        raise OptionError(explain("`kwargs` must be a dict.", received=f"kwargs={_shown(kwargs)}", expected=expected))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a function in C that does not tell
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise OptionError(
            explain(
                f"`{name}` cannot be called with these arguments: {error}.",
                received=f"args={_shown(args)}, kwargs={_shown(dict(kwargs or {}))}",
                expected=f"what fits {name}{signature}",
            )
        ) from None


def _wrong_args(args: object, do: str) -> OptionError:
    what = "`args` must be a tuple or a list of the function's arguments."
    expected = "such as args=(0.1,); the number of workers is `np`"
    return OptionError(explain(what, received=f"args={_shown(args)}", expected=expected, do=do))


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
