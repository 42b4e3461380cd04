"""Replaces TensorFlow's long errors about a lost worker by a short one that names it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import tensorflow as tf

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives.shm.messages import LostPeer, Mismatch, TimedOut
from tfdistkit.errors import explain
from tfdistkit.keras_adapter import private_collectives
from tfdistkit.strategies.consistency import call_positions

# Parts of TensorFlow's messages when a peer died, stopped, or cannot be reached ...
_GONE = (
    *("stopped sending heartbeats", "Heartbeat", "have crashed", "shut down"),
    *("failed to connect to all addresses", "Connection reset", "Connection refused", "Connection closed by peer"),
    *("Socket closed", "recvmsg:", "Broken pipe", "Timed out waiting"),
)
# ... when it is alive, but in another collective, or in none ...
_TIMED_OUT = ("Collective has timed out",)

# ... and when two ranks join a collective with different tensors.
_MISMATCHED = ("mismatch in the collective", "but got type", "Mismatched ")

# In the errors of `collectives.shm`.
_OWN_SIGN = "over shared memory"

# The prefix of TensorFlow's error for an eager operation.
_NODE = re.compile(r"^\{\{[^}]*\}\} ?")
# Of ours, over shared memory.
_WAITED = re.compile("over shared memory: it waited ")
_RANKS = re.compile(r"rank (\d+(?:, \d+)*) has left")
_TASK = re.compile(r"/job:(chief|worker)(?:/replica:\d+)?/task:(\d+)")

# Ends the collectives within this host, where its ranks wait for what one of them receives over TensorFlow.
_tell_host: Callable[[Exception], object] | None = None


def tell_host_by(tell: Callable[[Exception], object]) -> None:
    """Sets what tells the other ranks of this host of an error that TensorFlow raised here.

    Args:
        tell: Called with a `LostPeer`, `TimedOut` or `Mismatch`.
    """
    global _tell_host
    _tell_host = tell


def explained(error: tf.errors.OpError) -> tf.errors.OpError | None:
    """Returns an error of the same type that names the lost worker; None if the error has another cause.

    Args:
        error: The error that TensorFlow raised from a step.

    Returns:
        The error to raise `from error`, or None.
    """
    if getattr(error, "names_lost_peer", False):
        return None
    message = str(error.message)
    if "ollective" not in message and "Horovod" not in message:
        return None
    if any(sign in message for sign in _TIMED_OUT):
        text = explain(
            "The other workers did not join a collective operation within `timeout_s`.",
            received=f"{_first_line(message)}; this rank is in {call_positions.here()}",
            expected="all ranks to run the same steps: fit, evaluate, predict, metric.result(), in the same order",
            do="Look for a call that only some ranks make (`if rank == 0: model.evaluate(...)`), or raise `timeout_s`.",
        )
    elif any(sign in message for sign in _MISMATCHED):
        _report_to_peers(_first_line(message))
        text = explain(
            "The ranks run different steps: they met in a collective operation with other tensors.",
            received=f"this rank is in {call_positions.here()}; {_first_line(message)}",
            expected="the same calls on every rank, in the same order, and the same steps in them",
            do="Look at the logs of the other ranks for their position. Find what only one rank does: a call of its "
            "own (`if rank == 0: model.evaluate(...)`), `model.stop_training = True` (use "
            "tfdistkit.callbacks.StopTogether), an exception that it catches, another model.",
        )
    elif any(sign in message for sign in _GONE):
        text = explain(
            f"{_lost_peer(message)} no longer takes part, so the others cannot go on.",
            received=_first_line(message),
            do="Look at the log of that rank for the first error: it was killed, stopped, or cut off the network. "
            "Without an error it has ended before the others: a call that it left out, or an `exit()` of its own.",
        )
    else:
        return None
    if _tell_host is not None:
        _tell_host(_for_host(message))
    # An error that Python code of a graph raised has lost its type.
    kind = _kind(message) if isinstance(error, tf.errors.UnknownError) else type(error)
    short = kind(error.node_def, error.op, text)
    short.names_lost_peer = True
    return short


def _kind(message: str) -> type[tf.errors.OpError]:
    kinds = {_TIMED_OUT: tf.errors.DeadlineExceededError, _MISMATCHED: tf.errors.InvalidArgumentError}
    found = (kind for signs, kind in kinds.items() if any(sign in message for sign in signs))
    return next(found, tf.errors.UnavailableError)


def _report_to_peers(line: str) -> None:
    """Reports the error to the other ranks: TensorFlow raises it on one rank only, and the others would wait for it."""
    cluster = detect_cluster()
    if _OWN_SIGN in line and _tell_host is None:  # All ranks have been told.
        return
    if cluster.world_size > 1 and cluster.has_addresses and "Error reported from" not in line:
        with contextlib.suppress(tf.errors.OpError):  # A peer has reported it first.
            private_collectives.tell_other_workers(f"Collective ops: {line}")


def _for_host(message: str) -> Exception:
    if any(sign in message for sign in _TIMED_OUT):
        return TimedOut(_WAITED.split(_first_line(message))[-1])
    if any(sign in message for sign in _MISMATCHED):
        return Mismatch(_first_line(message))
    ranks = _lost_ranks(message)
    return LostPeer(f"rank {', '.join(str(rank) for rank in ranks)}" if ranks else "another worker")


def _lost_peer(message: str) -> str:
    """Returns the name of the lost peer."""
    cluster = detect_cluster()
    ranks = _lost_ranks(message)
    if not ranks:
        return "Another worker"
    return f"Rank {' and '.join(f'{r} ({cluster.workers[r]})' if cluster.has_addresses else str(r) for r in ranks)}"


def _lost_ranks(message: str) -> list[int]:
    """Returns the lost ranks: those that the message names, or the first task in it that is not this process."""
    cluster = detect_cluster()
    by_rank = _RANKS.search(message.partition("aborted by")[2])
    if by_rank is not None:
        return [int(rank) for rank in by_rank[1].split(", ")]
    # The operation name at the start of the message contains this process's own task.
    named = [(role, int(index)) for role, index in _TASK.findall(message.partition("aborted by")[2])]
    for role, index in named:
        addresses = cluster.addresses.get(role, ())
        if (role, index) != (cluster.task.role, cluster.task.index) and index < len(addresses):
            return [cluster.workers.index(addresses[index])]
    if cluster.world_size == 2 and not cluster.has_addresses:
        return [1 - cluster.rank]  # Horovod does not name the peer; of two ranks it is the other one.
    return [0] if "Heartbeat" in message and not cluster.is_chief else []


def _first_line(message: str) -> str:
    cause = message.partition("aborted by: ")[2] or message
    return _NODE.sub("", cause.strip().splitlines()[0]).rstrip(".")
