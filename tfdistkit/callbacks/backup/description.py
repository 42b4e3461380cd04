"""Describes models, optimizers, losses and data as plain data, to compare them with an earlier process.

Left out is what does not affect training: names that Keras generates (`dense_3`), seeds, initializers, and the
modules of classes. Objects without a configuration are described by their class, functions by their name, lambdas by
their code.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Weights and generator states come from the backup; the other keys locate a class or describe how it was built.
_LEFT_OUT = re.compile(
    r"seed|module|registered_name|build_config|compile_config|batch_(input_)?shape|(.*_)?initializer|learning_rate"
)
_LONGEST = 200
_SAMPLED_ROWS, _SAMPLED_VALUES = 32, 1024
_DEEPEST = 20


def is_made_by_keras(name: Any, of_class: str) -> bool:
    """Returns whether Keras generates such a name for an object of a class: `dense`, `dense_3`."""
    return _letters(_without_number(str(name))) == _letters(of_class)


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def describe(value: Any, names: dict[str, str] | None = None, depth: int = 0) -> Any:
    """Describes a value as plain data, equal in every process for equal values.

    Args:
        value: The value.
        names: Replaces names that differ between processes.
        depth: The nesting depth.
    """
    names = names or {}
    inner = functools.partial(describe, names=names, depth=depth + 1)
    if value is None or isinstance(value, (bool, int, float)) or depth > _DEEPEST:
        return None if depth > _DEEPEST else value
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, np.generic):
        return inner(value.item())
    if isinstance(value, (np.ndarray, tf.Tensor, keras.Variable)):
        return sample(value)
    if isinstance(value, dict):
        return _of_dict(value, inner)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(map(str, value)) if isinstance(value, (set, frozenset)) else list(value)
        return [inner(one) for one in items] if len(items) <= _LONGEST else _hash(repr(items))
    return _of_object(value, inner)


def _of_dict(value: dict[Any, Any], inner: Any) -> Any:
    kind = value.get("class_name")
    if not isinstance(kind, str) or "config" not in value:
        return {str(key): inner(one) for key, one in value.items()}
    if kind == "__lambda__":
        return {"class": "<lambda>"}
    if not isinstance(value["config"], dict):
        return inner(value["config"])
    return _of_config(kind.rpartition(">")[2], value["config"], inner)


def _of_config(kind: str, config: dict[str, Any], inner: Any) -> dict[str, Any]:
    if kind == "__keras_tensor__":
        return {"class": kind, "keras_history": inner(config.get("keras_history"))}
    kept = {key: one for key, one in config.items() if not _LEFT_OUT.fullmatch(str(key))}
    name = _without_number(str(kept.get("name", "")))
    if is_made_by_keras(name, kind):
        del kept["name"]
    elif _letters(name).endswith(_letters(kind)):
        kept["name"] = name  # Bidirectional calls its layers `forward_lstm_1`.
    return {"class": kind, **{str(key): inner(one) for key, one in kept.items()}}


def _of_object(value: Any, inner: Any) -> Any:
    value = getattr(value, "python_function", value)
    if isinstance(value, functools.partial):
        return {"class": "partial", "function": inner(value.func), "arguments": inner([value.args, value.keywords])}
    if isinstance(value, types.MethodType):
        return value.__qualname__
    if isinstance(value, types.FunctionType):
        return _of_function(value, inner)
    if isinstance(value, type) or callable(value) and hasattr(value, "__name__"):
        return value.__name__
    kind = type(value).__name__
    if not hasattr(value, "get_config"):
        return {"class": kind}
    try:
        config = value.get_config()
    except Exception:  # A user's class without a working configuration: only its name is known.
        return {"class": kind}
    # The configuration of Keras losses lacks their arguments, such as Huber's `delta`.
    arguments = vars(value) if isinstance(value, keras.Loss) else {}
    own = {key: one for key, one in arguments.items() if isinstance(one, (bool, int, float, dict))}
    return _of_config(kind, {**own, **config}, inner)


def _of_function(function: types.FunctionType, inner: Any) -> Any:
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell is not None]
    taken = [one for one in cells if isinstance(one, (bool, int, float, str))]
    described = {"class": function.__name__, "taken": taken}
    if function.__name__ == "<lambda>":
        # Bytecode differs between Python versions, so each has its own key; missing keys are not compared.
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        described[f"code, by Python {version}"] = _hash(repr(list(_code(function.__code__))))
    return described


def _code(code: types.CodeType) -> Iterator[Any]:
    yield code.co_code.hex()
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sample(array: Any) -> dict[str, Any] | None:
    """Returns the shape and dtype of an array, and a sample of its values, without reading all of it.

    Args:
        array: A NumPy array, a tensor, a variable, a data frame, or another object with rows.

    Returns:
        Plain data; None if its rows cannot be read.
    """
    try:
        shape = [int(size) for size in array.shape]
        values = _values(array, shape)
    except Exception:  # Another library's way of indexing rows: they are not compared.
        return None
    described = {"shape": shape, "dtype": str(values.dtype) if values.dtype.kind not in "OSU" else "string"}
    if values.dtype.kind in "OSU":
        # Without folders, which may differ between runs.
        texts = (one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in values.reshape(-1))
        return {**described, "hash": _hash(repr([text.rpartition("/")[2] for text in texts]))}
    if values.dtype.kind not in "biufc":
        values = values.astype(np.float32)  # bfloat16
    return {**described, "values": values.reshape(-1)}


def _values(array: Any, shape: list[int]) -> np.ndarray:
    if isinstance(array, tf.Tensor):
        flat = tf.reshape(array, [-1])
        return np.asarray(tf.gather(flat, _spread(int(flat.shape[0]), _SAMPLED_VALUES)).numpy())
    if not shape:
        return np.asarray(array)
    rows = _spread(shape[0], _SAMPLED_ROWS)
    taken = array.iloc[rows] if hasattr(array, "iloc") else array[rows]
    values = np.asarray(taken.toarray() if hasattr(taken, "toarray") else taken).reshape(-1)
    return values[_spread(len(values), _SAMPLED_VALUES)]


def _spread(length: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, max(length - 1, 0), min(length, most)).astype(np.int64))


def differences(now: Any, then: Any, path: str = "") -> list[str]:
    """Lists the differences of two descriptions as texts; keys that only one of them has are not compared.

    Args:
        now: The present description.
        then: The description in the backup.
        path: The part that is described.
    """
    if isinstance(now, dict) and isinstance(then, dict):
        if now.get("class") != then.get("class"):
            return [_differs(path, now.get("class"), then.get("class"))]
        # Keras versions differ in their arguments.
        found = [differences(now[key], then[key], f"{path}, {key}") for key in now if key in then]
        return [one for each in found for one in each]
    if isinstance(now, list) and isinstance(then, list):
        if len(now) != len(then):
            return [f"{path}: {_counted(now, then)}, in the backup {_counted(then, now)}"]
        found = [_differences_of_items(a, b, path, i) for i, (a, b) in enumerate(zip(now, then))]
        return [one for each in found for one in each]
    if isinstance(now, np.ndarray) and isinstance(then, np.ndarray):
        return [] if _close(now, then) else [f"{path}: the values differ"]
    is_same = _close(np.asarray(now), np.asarray(then)) if _is_number(now) and _is_number(then) else now == then
    return [] if is_same else [_differs(path, now, then)]


def _counted(items: list[Any], others: list[Any]) -> str:
    """Returns how many items there are, and the classes of those that other items do not have."""
    classes = [[one["class"] for one in some if isinstance(one, dict) and "class" in one] for some in (items, others)]
    more = ", ".join((collections.Counter(classes[0]) - collections.Counter(classes[1])).elements())
    return f"{len(items)} items" + (f", with {more}" if more else "")


def _differences_of_items(now: Any, then: Any, path: str, index: int) -> list[str]:
    """Lists the differences of two items of lists; a pair of a name and a value is called by its name."""
    if all(isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) for one in (now, then)):
        if now[0] == then[0]:
            return differences(now[1], then[1], f"{path}, {now[0]}")
    return differences(now, then, f"{path} {index}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _close(now: np.ndarray, then: np.ndarray) -> bool:
    """Returns whether numbers are equal up to the rounding of another processor."""
    if now.shape != then.shape:
        return False
    if now.dtype.kind in "fc" or then.dtype.kind in "fc":
        size = float(np.nanmax(np.abs(then), initial=0.0)) if then.size else 0.0
        relative, absolute = (1e-3, 1e-5 * size) if now.size > 1 else (1e-6, 0.0)
        return bool(np.allclose(now, then, relative, absolute, equal_nan=True))
    return bool(np.array_equal(now, then))


def _differs(path: str, now: Any, then: Any) -> str:
    return f"{path}: {_short(now)}, in the backup {_short(then)}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("class", "a dict")
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
