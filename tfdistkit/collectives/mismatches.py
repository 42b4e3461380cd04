"""Detects ranks that call different collectives, or one with other dtypes or shapes, before it hangs or sums garbage.

Each rank describes its call in a line (`all_reduce sum: float32 [4, 8]`), the ranks exchange these lines, and each
compares them. The exchange is a collective itself, so every rank must make it for the same calls. Which calls these
are depends on the count of calls of a kind, counted where the call runs - in a graph, inside of the graph - and never
on what one rank alone knows (a retrace, the line of the call).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit import env
from tfdistkit.collectives.communicators import Communicator
from tfdistkit.collectives.registry import CallCounts
from tfdistkit.errors import OptionError, explain

# Calls of each kind that are compared by default.
FIRST_CALLS = 3

# Bytes of a line; a longer one is cut, but the hash of the whole line is compared too.
_LINE_BYTES = 512

_mode: bool | None = None


def check(always: bool | None = True) -> None:
    """Sets which collectives are compared between the ranks before they run.

    Call it with the same argument on every rank, before the first collective; a `tf.function` keeps the setting
    from when it was traced. The environment variable `TFDISTKIT_CHECK_COLLECTIVES` (`1` or `0`) does the same.

    Args:
        always: True compares every call, for one more small collective each; False compares none; None (the
            default without this call) compares the first three of each function.
    """
    global _mode
    _mode = always


def compares() -> bool | None:
    """Returns which calls are compared: all (True), none (False), or the first ones (None)."""
    if _mode is not None:
        return _mode
    return {"1": True, "0": False}.get(env.text(env.CHECK_COLLECTIVES) or "")


def compared(
    communicator: Communicator, counts: CallCounts | None, call: str, tensors: list[tf.Tensor], free_axis: int | None
) -> list[tf.Tensor]:
    """Returns `tensors` after all ranks have made the same call with the same dtypes and shapes.

    Args:
        communicator: The transport between the ranks.
        counts: Counts the calls; None compares nothing.
        call: The name of the function, then its other arguments.
        tensors: The tensors of the call.
        free_axis: The axis along which lengths may differ, if any.

    Returns:
        The tensors. Where ranks differ, OptionError in eager mode; in a graph, InvalidArgumentError.
    """
    mode = compares()
    if counts is None or mode is False:
        return tensors
    kind = call.split()[0]
    number = counts.next(kind)

    def exchange() -> tf.Tensor:
        return _exchange(communicator, _line(call, tensors, free_axis))

    if tf.executing_eagerly():
        if mode or int(number) <= FIRST_CALLS:
            try:
                exchange()
            except OptionError:
                counts.take_back(kind)  # Another rank may have counted a call of another kind.
                raise
        return tensors
    done = exchange() if mode else tf.cond(number <= FIRST_CALLS, exchange, lambda: tf.constant(0, tf.int64))
    with tf.control_dependencies([done]):
        return [tf.identity(t) for t in tensors]


def compare_call(communicator: Communicator, call: str, timeout_s: float | None) -> tf.Tensor:
    """Compares only the name of a call between the ranks: a barrier whose error names ranks in other calls.

    Args:
        communicator: The transport between the ranks.
        call: The call of this rank.
        timeout_s: Seconds to wait; None uses the timeout of the strategy.

    Returns:
        A tensor that is available once all ranks have made the call.
    """
    return _exchange(communicator, _line(call, [], None), timeout_s)


def _line(call: str, tensors: list[tf.Tensor], free_axis: int | None) -> tf.Tensor:
    """Describes a call: the hash of the line, and the line."""
    pieces: list[Any] = [call]
    for i, tensor in enumerate(tensors):
        pieces.append(f"{'; ' if i else ': '}{tensor.dtype.name} [")
        for axis, length in enumerate(tensor.shape):
            pieces.append(", " if axis else "")
            known = "*" if axis == free_axis else length
            pieces.append(tf.strings.as_string(tf.shape(tensor)[axis]) if known is None else str(known))
        pieces.append("]")
    with tf.device("CPU:0"):
        line = tf.strings.join(pieces)
        return tf.strings.join([tf.strings.as_string(tf.strings.to_hash_bucket_fast(line, 2**60)), "|", line])


def _exchange(communicator: Communicator, line: tf.Tensor, timeout_s: float | None = None) -> tf.Tensor:
    with tf.device("CPU:0"):
        row = tf.cast(tf.io.decode_raw(line, tf.uint8, fixed_length=_LINE_BYTES), tf.int32)
    table = communicator.table(row, timeout_s)
    if tf.executing_eagerly():
        return _compare(table)
    with tf.device("CPU:0"):
        return tf.py_function(_compare, [table], tf.int64)


def _compare(table: Any) -> Any:
    """Raises:
    OptionError: if the ranks describe different calls.
    """
    lines = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table.numpy().astype("uint8")]
    if len(set(lines)) == 1:
        return tf.constant(0, tf.int64)
    calls = [line.partition("|")[2] for line in lines]
    raise OptionError(
        explain(
            "All ranks must make the same collective call.",
            received="; ".join(f"rank {rank}: {line}" for rank, line in enumerate(calls)),
            expected="the same function, dtypes and shapes on every rank, in the same order",
            do="Remove what depends on the rank: a call under `if rank == 0:`, a shape of the rank's own data.",
        )
    )
