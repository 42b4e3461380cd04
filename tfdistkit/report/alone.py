"""Detects jobs whose processes use TensorFlow without a strategy, and so train independently.

The worker leaves a mark when such a script succeeds. The launcher warns if all processes left one: without a strategy,
each process trains its own model, and all of them exit with code 0.
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

# Packages with which a script communicates between processes without a strategy.
_COMMUNICATION = ("horovod", "mpi4py")
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras")
# Timeout in seconds; TensorFlow's server is in this process, so it answers at once.
_ANSWER_S = 1.0


def leave_alone_mark() -> None:
    """Leaves the mark in this process's folder, if it has one and the script trained without a strategy."""
    folder = env.text(env.TASK_DIR)
    if folder is not None and _worked_alone():
        with contextlib.suppress(OSError):
            Path(folder, FILE_NAME).touch()


def all_worked_alone(folders: Iterable[Path]) -> bool:
    """Returns whether every process of a job left the mark.

    Args:
        folders: The folders of the processes.
    """
    marks = [(folder / FILE_NAME).exists() for folder in folders]
    return len(marks) > 1 and all(marks)


def describe_alone(count: int) -> str:
    """Returns the warning for a job whose processes all worked without a strategy.

    Args:
        count: The number of processes.
    """
    return (
        f"warning: no process of this job made a strategy: the {count} processes worked independently, each with a "
        "model of its own.\n"
        "Write `strategy = tfdistkit.strategy()` at the top of the script, and make and compile the model in "
        f"`with strategy.scope():`. To train a model in each process, set {env.OWN_MODELS}=1."
    )


def _worked_alone() -> bool:
    if requested.was_noted("strategy") or env.text(env.OWN_MODELS) == "1":
        return False
    if not any(name in sys.modules for name in _FRAMEWORKS) or any(name in sys.modules for name in _COMMUNICATION):
        return False
    # A script that reads its rank may only prepare data; one that trains with Keras needs a strategy.
    if requested.was_noted("rank") and not _has_trained_model():
        return False
    try:
        cluster = detect_cluster()
    except TfdistkitError:
        return False
    if cluster.world_size == 1 or not cluster.is_training:
        return False
    # A running server of TensorFlow shows that the script uses TensorFlow's own strategy.
    return cluster.address is None or look(cluster.address, _ANSWER_S) is not Sign.ALIVE


def _has_trained_model() -> bool:
    """Returns whether this process has a Keras model whose optimizer is built."""
    model = getattr(sys.modules.get("keras"), "Model", None)
    if not isinstance(model, type):
        return False
    # Reads the type only: attributes of lazy modules would import them.
    found = [one for one in gc.get_objects() if issubclass(type(one), model)]
    return any(getattr(getattr(one, "optimizer", None), "built", False) for one in found)
