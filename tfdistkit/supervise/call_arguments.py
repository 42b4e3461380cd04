"""Check the arguments of `tfdistkit.launch` before any worker starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from tfdistkit.errors import OptionError, explain

_LONGEST_SHOWN = 60


def check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Checks that a function accepts the given arguments.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        OptionError: if it does not.
    """
    if not callable(fn):
        is_script = isinstance(fn, str) and fn.endswith((".py", ".pyz"))
        do = "Give the function itself, without calling it: tfdistkit.launch(train, args=(0.1,), np=2)"
        do = f"For a script, type: tfdistkit run -np 2 {fn}" if is_script else do
        raise OptionError(explain("`fn` must be a function.", received=f"fn={_shown(fn)}", do=do))
    name = getattr(fn, "__name__", "fn")
    name = name if name.isidentifier() else "fn"
    if isinstance(args, Mapping):
        raise _wrong_args(args, f"Pass keyword arguments as `kwargs`: tfdistkit.launch({name}, kwargs={_shown(args)})")
    if isinstance(args, int) and not isinstance(args, bool):
        workers = f"For {args} workers: tfdistkit.launch({name}, np={args})" if args > 0 else ""
        one = f"For the argument {args}: tfdistkit.launch({name}, ({args},))"
        raise _wrong_args(args, "\n".join(filter(None, [workers, one])))
    if isinstance(args, (str, bytes, bytearray)) or not isinstance(args, Sequence):
        short = _shown(args) if len(_shown(args)) <= _LONGEST_SHOWN // 2 else "value"
        raise _wrong_args(args, f"Put a single argument into a tuple: tfdistkit.launch({name}, ({short},))")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        what = "`kwargs` must be a dict of keyword arguments, such as {'epochs': 3}."
        raise OptionError(explain(what, received=f"kwargs={_shown(kwargs)}"))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a C function without a signature
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise OptionError(
            explain(
                f"`{name}` cannot be called with these arguments: {error}.",
                received=f"args={_shown(args)}, kwargs={_shown(dict(kwargs or {}))}",
                expected=f"arguments for {name}{signature}",
            )
        ) from None


def require_fixed(np: object) -> None:
    """Checks that the number of workers of a call is one number.

    Args:
        np: The number of workers.

    Raises:
        OptionError: for a range, such as `"2:3"` or `(2, 3)`.
    """
    is_text = isinstance(np, str) and ":" in np
    if not is_text and not (isinstance(np, (tuple, list, range)) and len(np) > 1):
        return
    raise OptionError(
        explain(
            "`np` must be one number: `tfdistkit.launch` starts a fixed number of workers, each with one result.",
            received=f"np={_shown(np)}",
            do="Write the function into a script, and start it with `tfdistkit run -np MIN:MAX script.py`. Or use "
            "`max_restarts`: with BackupAndResume in `fit` a restart continues from the last backup.",
        )
    )


def _wrong_args(args: object, do: str) -> OptionError:
    what = "`args` must be a tuple or a list of the function's arguments."
    expected = "a tuple such as (0.1,); the number of workers is `np`"
    return OptionError(explain(what, received=f"args={_shown(args)}", expected=expected, do=do))


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
