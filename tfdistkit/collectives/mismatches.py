"""Finds ranks that call a collective with different things, before it hangs or adds what does not belong together.

Each rank writes down its call (`all_reduce sum: float32 [4, 8]`), the ranks exchange these lines, and each
compares them. The exchange is a collective itself, so every rank must make it for the same calls: it goes by the
number of the call among those of its kind, which is counted where the call runs - in a graph, inside of the graph -
and never by what one rank alone knows (that it traces again, from which line it calls).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit import env
from tfdistkit.collectives.communicators import Communicator
from tfdistkit.collectives.registry import CallCounts
from tfdistkit.errors import OptionError, explain

# How many calls of each kind are compared if nobody says otherwise.
FIRST_CALLS = 3

# What a line may take, in bytes; what is longer is cut, but its hash is compared too.
_LINE_BYTES = 512

_mode: bool | None = None


def check(always: bool | None = True) -> None:
    """Says how many collectives are compared between the ranks before they run.

    Call it with the same argument on every rank, before the first collective; a `tf.function` keeps what was
    said when it was traced. The environment variable `TFDISTKIT_CHECK_COLLECTIVES` (`1` or `0`) does the same.

    Args:
        always: True compares every call, for one more small collective each; False compares none; None
            compares the first three of each function, as if nothing had been said.
    """
    global _mode
    _mode = always


def compares() -> bool | None:
    """Returns whether calls are compared: all of them, none, or (None) the first ones."""
    if _mode is not None:
        return _mode
    return {"1": True, "0": False}.get(env.text(env.CHECK_COLLECTIVES) or "")


def compared(
    communicator: Communicator, counts: CallCounts | None, call: str, tensors: list[tf.Tensor], free_axis: int | None
) -> list[tf.Tensor]:
    """Returns `tensors`, which are there only when all ranks make the same call with the like.

    Args:
        communicator: What goes between the ranks.
        counts: Where calls are counted; None compares nothing.
        call: The name of the function, then its other arguments.
        tensors: What it is called with.
        free_axis: The axis along which lengths may differ, if there is one.

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


def meet(communicator: Communicator, call: str, timeout_s: float | None) -> tf.Tensor:
    """Lets the ranks exchange a call and nothing else: a barrier that tells who is elsewhere.

    Args:
        communicator: What goes between the ranks.
        call: What this rank calls.
        timeout_s: Seconds to wait; None waits as long as the strategy does.

    Returns:
        A tensor that is there when all ranks have come.
    """
    return _exchange(communicator, _line(call, [], None), timeout_s)


def _line(call: str, tensors: list[tf.Tensor], free_axis: int | None) -> tf.Tensor:
    """Writes a call down: the hash of the line, and the line."""
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
    OptionError: if the ranks wrote down different calls.
    """
    lines = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table.numpy().astype("uint8")]
    if len(set(lines)) == 1:
        return tf.constant(0, tf.int64)
    said = [line.partition("|")[2] for line in lines]
    raise OptionError(
        explain(
            "The ranks do not call a collective with the same thing.",
            received="; ".join(f"rank {rank}: {line}" for rank, line in enumerate(said)),
            expected="the same function, dtypes and shapes on every rank, in the same order",
            do="Look for a call that depends on the rank, or on data that only one rank has.",
        )
    )
