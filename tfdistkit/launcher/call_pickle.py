"""Pickles functions by value, with the names of their files."""

from __future__ import annotations

import collections
import io
import types
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickles an object as `cloudpickle.dumps` does.

    Since version 3.1.3 cloudpickle writes "<dynamic-code>" for the file of each function that it pickles by value, and
    tracebacks of workers lose their source lines.

    Args:
        value: The object.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]
    make, arguments, *rest = reduce(code)
    named = tuple(code.co_filename if one == "<dynamic-code>" else one for one in arguments)
    return (make, named, *rest)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = collections.ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
