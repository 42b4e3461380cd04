"""Says in one sentence what TensorFlow says in a page when another worker is gone."""

from __future__ import annotations

import contextlib
import re

import tensorflow as tf

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.errors import explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency import call_positions

# What TensorFlow's messages hold when a peer died, stopped, or can no longer be reached ...
_GONE = (
    *("stopped sending heartbeats", "Heartbeat", "have crashed", "shut down"),
    *("failed to connect to all addresses", "Connection reset", "Connection refused", "Connection closed by peer"),
    *("Socket closed", "recvmsg:", "Broken pipe", "Timed out waiting"),
)
# ... and when it lives, but takes part in another collective, or in none.
_TIMED_OUT = ("Collective has timed out",)

# ... and when two ranks bring different things to one collective.
_APART = ("mismatch in the collective", "but got type")

# How TensorFlow begins an error of an operation that runs by itself.
_NODE = re.compile(r"^\{\{[^}]*\}\} ?")
_TASK = re.compile(r"/job:(chief|worker)(?:/replica:\d+)?/task:(\d+)")


def explained(error: tf.errors.OpError) -> tf.errors.OpError | None:
    """Returns an error of the same type that names the worker that is gone; None if the error says something else.

    Args:
        error: What TensorFlow raised from a step.

    Returns:
        The error to raise `from error`, or None when a lost worker is not the reason.
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
    elif any(sign in message for sign in _APART):
        _tell_others(_first_line(message))
        text = explain(
            "The ranks run different steps: one of them has left a call of fit, evaluate or predict, or went on alone.",
            received=f"this rank is in {call_positions.here()}; {_first_line(message)}",
            expected="the same calls on every rank, in the same order, and the same steps in them",
            do="Look at the logs of the other ranks for where they are. Find what one rank alone does: "
            "`model.stop_training = True` (use tfdistkit.callbacks.StopTogether), an exception that it catches.",
        )
    elif any(sign in message for sign in _GONE):
        text = explain(
            f"{_who(message)} no longer takes part, so the others cannot go on.",
            received=_first_line(message),
            do="Look at the log of that rank for the first error: it was killed, stopped, or cut off the network.",
        )
    else:
        return None
    clear = type(error)(error.node_def, error.op, text)
    clear.names_lost_peer = True
    return clear


def _tell_others(said: str) -> None:
    """TensorFlow tells one of the ranks alone: the other would wait until this one is gone."""
    cluster = detect_cluster()
    if cluster.world_size > 1 and cluster.has_addresses and "Error reported from" not in said:
        with contextlib.suppress(tf.errors.OpError):  # The others were the first to tell.
            private_api.tell_other_workers(f"Collective ops: {said}")


def _who(message: str) -> str:
    """Names the peer from the tasks in TensorFlow's message; the one that is not this process."""
    cluster = detect_cluster()
    # The name of the operation that failed, in front, holds this process's own task.
    named = [(role, int(index)) for role, index in _TASK.findall(message.partition("aborted by")[2])]
    for role, index in named:
        addresses = cluster.addresses.get(role, ())
        if (role, index) != (cluster.task.role, cluster.task.index) and index < len(addresses):
            rank = cluster.workers.index(addresses[index])
            return f"Rank {rank} ({addresses[index]})"
    if cluster.world_size == 2 and not cluster.has_addresses:
        return f"Rank {1 - cluster.rank}"  # Horovod says nothing of whom it waited for; here it can be nobody else.
    if "Heartbeat" in message and not cluster.is_chief:
        return f"Rank 0 ({cluster.workers[0]})"
    return "Another worker"


def _first_line(message: str) -> str:
    said = message.partition("aborted by: ")[2] or message
    return _NODE.sub("", said.strip().splitlines()[0]).rstrip(".")
