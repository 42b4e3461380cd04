"""The mark of a process of a job that used TensorFlow, but asked for no strategy: it worked apart from the others.

The worker frame leaves it when its script ends well. The launcher tells the user when all processes left one: a script
that never asks for a strategy trains a model in each process, and all of them end with exit code 0.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable
from pathlib import Path

from tfdistkit import env
from tfdistkit.cluster import requested
from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.cluster.liveness import Sign, look
from tfdistkit.errors import TfdistkitError

FILE_NAME = "alone"

# With these a script talks to the other processes by itself.
_OTHER_WAYS = ("horovod", "mpi4py")
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras")
# TensorFlow's server is in this process: it answers at once.
_LOOK_S = 1.0


def leave_alone_mark() -> None:
    """Leaves the mark in this process's folder, if a launcher gave it one and the script worked alone."""
    folder = env.text(env.TASK_DIR)
    if folder is not None and _worked_alone():
        with contextlib.suppress(OSError):
            Path(folder, FILE_NAME).touch()


def all_worked_alone(folders: Iterable[Path]) -> bool:
    """Returns whether each process of a job left the mark.

    Args:
        folders: Those of its processes.
    """
    marks = [(folder / FILE_NAME).exists() for folder in folders]
    return len(marks) > 1 and all(marks)


def describe_alone(count: int) -> str:
    """Returns what the user is told when all processes of a job worked alone.

    Args:
        count: How many processes there were.
    """
    return (
        f"warning: no process of this job asked for a strategy: the {count} processes worked apart from each other, "
        f"and what they trained are {count} models.\n"
        "Write `strategy = tfdistkit.strategy()` at the top of the script, and make and compile the model in "
        f"`with strategy.scope():`. If each process shall work alone, set {env.OWN_MODELS}=1."
    )


def _worked_alone() -> bool:
    if requested.was_noted("strategy") or env.text(env.OWN_MODELS) == "1":
        return False
    if not any(name in sys.modules for name in _FRAMEWORKS) or any(name in sys.modules for name in _OTHER_WAYS):
        return False
    # A script that knows its place may prepare data, say; one that trains with Keras needs a strategy for it.
    if requested.was_noted("rank") and not _has_trained_model():
        return False
    try:
        cluster = detect_cluster()
    except TfdistkitError:
        return False
    if cluster.world_size == 1 or not cluster.is_training:
        return False
    # Where TensorFlow's server runs, the script uses a strategy of TensorFlow's own.
    return cluster.address is None or look(cluster.address, _LOOK_S) is not Sign.ALIVE


def _has_trained_model() -> bool:
    """Whether there is a Keras model with an optimizer that has updated something."""
    model = getattr(sys.modules.get("keras"), "Model", None)
    if not isinstance(model, type):
        return False
    # The type alone: to ask an object would load modules that load themselves when asked.
    found = [one for one in gc.get_objects() if issubclass(type(one), model)]
    return any(getattr(getattr(one, "optimizer", None), "built", False) for one in found)
