"""Replaces TensorFlow's long errors about a lost worker by a short one that names it."""

from __future__ import annotations

import contextlib
import re

import tensorflow as tf

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.errors import explain
from tfdistkit.keras_adapter import private_api
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
_MISMATCHED = ("mismatch in the collective", "but got type")

# The prefix of TensorFlow's error for an eager operation.
_NODE = re.compile(r"^\{\{[^}]*\}\} ?")
_TASK = re.compile(r"/job:(chief|worker)(?:/replica:\d+)?/task:(\d+)")


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
            "The ranks run different steps: one of them has left a call of fit, evaluate or predict.",
            received=f"this rank is in {call_positions.here()}; {_first_line(message)}",
            expected="the same calls on every rank, in the same order, and the same steps in them",
            do="Look at the logs of the other ranks for their position. Find what only one rank does: "
            "`model.stop_training = True` (use tfdistkit.callbacks.StopTogether), an exception that it catches.",
        )
    elif any(sign in message for sign in _GONE):
        text = explain(
            f"{_lost_peer(message)} no longer takes part, so the others cannot go on.",
            received=_first_line(message),
            do="Look at the log of that rank for the first error: it was killed, stopped, or cut off the network.",
        )
    else:
        return None
    short = type(error)(error.node_def, error.op, text)
    short.names_lost_peer = True
    return short


def _report_to_peers(line: str) -> None:
    """Reports the error to the other ranks: TensorFlow raises it on one rank only, and the others would wait for it."""
    cluster = detect_cluster()
    if cluster.world_size > 1 and cluster.has_addresses and "Error reported from" not in line:
        with contextlib.suppress(tf.errors.OpError):  # A peer has reported it first.
            private_api.tell_other_workers(f"Collective ops: {line}")


def _lost_peer(message: str) -> str:
    """Returns the name of the lost peer: the first task in TensorFlow's message that is not this process."""
    cluster = detect_cluster()
    # The operation name at the start of the message contains this process's own task.
    named = [(role, int(index)) for role, index in _TASK.findall(message.partition("aborted by")[2])]
    for role, index in named:
        addresses = cluster.addresses.get(role, ())
        if (role, index) != (cluster.task.role, cluster.task.index) and index < len(addresses):
            rank = cluster.workers.index(addresses[index])
            return f"Rank {rank} ({addresses[index]})"
    if cluster.world_size == 2 and not cluster.has_addresses:
        return f"Rank {1 - cluster.rank}"  # Horovod does not name the peer; of two ranks it is the other one.
    if "Heartbeat" in message and not cluster.is_chief:
        return f"Rank 0 ({cluster.workers[0]})"
    return "Another worker"


def _first_line(message: str) -> str:
    cause = message.partition("aborted by: ")[2] or message
    return _NODE.sub("", cause.strip().splitlines()[0]).rstrip(".")
