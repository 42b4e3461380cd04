"""Collectives without a tensor argument: `barrier`, and `broadcast_object` for Python objects."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.collectives import registry
from tfdistkit.collectives.communicators import Communicator
from tfdistkit.collectives.mismatches import compare_call, compared
from tfdistkit.collectives.operations import require_rank
from tfdistkit.collectives.process_sets import ProcessSet
from tfdistkit.collectives.resolve import communicator, explained
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.validation import require_positive

_FAILED = -1


@explained
def barrier(timeout_s: float | None = None, process_set: ProcessSet | None = None) -> None:
    """Blocks until every rank has called it.

    In a graph, other operations with side effects (variables, other collectives) keep their order around it.

    Args:
        timeout_s: Seconds to wait. Default: the `timeout_s` of the strategy; over Horovod, no timeout. After a
            barrier that timed out the ranks are out of step, so end the job.
        process_set: The ranks that take part. Default: all. Horovod only.

    Raises:
        OptionError: (a ValueError) if `timeout_s` is not a positive number; in eager mode also if another rank calls
            another collective (in a graph that is a `tf.errors.InvalidArgumentError`).
        UnsupportedError: (a RuntimeError) with `timeout_s` in a `tf.function` over Horovod.
        tf.errors.DeadlineExceededError: if a rank does not call it in time.
    """
    if timeout_s is not None:
        timeout_s = require_positive("timeout_s", timeout_s, "seconds")
    between = communicator(process_set)
    if between.size == 1:
        return
    compare_call(between, "barrier", timeout_s)


@explained
def broadcast_object(obj: Any = None, root_rank: int = 0, process_set: ProcessSet | None = None) -> Any:
    """Broadcasts a Python object from one rank to all.

    The object is sent as a pickle, and unpickling runs code that the sender chooses: the ranks trust each other, as
    processes of one job that run the same script do.

    Args:
        obj: The object, on `root_rank`; ignored on the other ranks.
        root_rank: The rank that sends; counted within `process_set` if one is given.
        process_set: The ranks that take part. Default: all. Horovod only.

    Returns:
        The object itself on `root_rank`, a copy elsewhere.

    Raises:
        OptionError: (a ValueError) on every rank if the object cannot be pickled, or `root_rank` is out of range.
        UnsupportedError: (a RuntimeError) inside of a `tf.function`.
    """
    if not tf.executing_eagerly():
        raise UnsupportedError(
            explain(
                "`broadcast_object` must be called outside of `tf.function`: Python objects are not part of a graph.",
                do="Move the call out of the function, or send a tensor with `broadcast`.",
            )
        )
    between = communicator(process_set)
    root_rank = require_rank(root_rank, between.size)
    if between.size == 1:
        return obj
    last = registry.last_made()
    counts = process_set.calls if process_set is not None else None if last is None else last.calls
    compared(between, counts, f"broadcast_object root_rank={root_rank}", [], None)
    if int(between.rank()) == root_rank:
        _send(between, obj, root_rank)
        return obj
    return _receive(between, root_rank)


def _send(between: Communicator, obj: Any, root_rank: int) -> None:
    try:
        data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        # The other ranks wait for a length.
        between.broadcast(tf.constant([_FAILED], tf.int64), root_rank)
        raise OptionError(explain(f"`obj` cannot be pickled: {error}.", received=f"a {type(obj).__name__}")) from error
    between.broadcast(tf.constant([len(data)], tf.int64), root_rank)
    # Packed into int64: TensorFlow cannot sum bytes, and an int64 for each byte would send eight times as much.
    padded = data + bytes(-len(data) % 8)
    between.broadcast(tf.constant(np.frombuffer(padded, np.int64)), root_rank)


def _receive(between: Communicator, root_rank: int) -> Any:
    length = int(between.broadcast(tf.constant([0], tf.int64), root_rank)[0])
    if length == _FAILED:
        raise OptionError(explain(f"`obj` cannot be pickled on rank {root_rank}.", do="See the log of that rank."))
    numbers = between.broadcast(tf.zeros([-(-length // 8)], tf.int64), root_rank)
    return pickle.loads(numbers.numpy().tobytes()[:length])
