"""The only place that reads or writes environment variables.

The launcher and the workers talk through these variables (down) and through files in the run folder
(up), so any other launcher can stand in for ours by setting the same names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tfdistkit.errors import ClusterConfigError, explain

# TensorFlow's own description of a cluster: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
TF_CONFIG = "TF_CONFIG"

# Which of the workers on this host this process is, and how many there are (what CUDA devices are picked by).
LOCAL_RANK = "TFDISTKIT_LOCAL_RANK"
LOCAL_WORLD_SIZE = "TFDISTKIT_LOCAL_WORLD_SIZE"
# The folder of this run: logs, events, error files.
RUN_DIR = "TFDISTKIT_RUN_DIR"
# The process that started this worker: the worker ends when it is gone.
PARENT_PID = "TFDISTKIT_PARENT_PID"
# This process's own folder there: what it wrote, its crash record.
TASK_DIR = "TFDISTKIT_TASK_DIR"
# This process's number among those of its role, for logs and error files (training asks `tfdistkit.rank()`).
RANK = "TFDISTKIT_RANK"
# How often the job was started again after a failure, from 0 (torchrun calls it TORCHELASTIC_RESTART_COUNT).
ATTEMPT = "TFDISTKIT_ATTEMPT"
# One job's own mark: every process that descends from a worker carries it, so none can be left behind.
JOB_ID = "TFDISTKIT_JOB_ID"
# What the processes of one job prove to each other to know, before they tell anything: anybody else is turned away.
SECRET = "TFDISTKIT_SECRET"
# "0": do not compare this process's own address with the addresses of this machine (address translation).
CHECK_ADDRESS = "TFDISTKIT_CHECK_ADDRESS"
# Which reader of the cluster counts, where several find one (`tfdistkit env` shows them); "single": none of them.
CLUSTER = "TFDISTKIT_CLUSTER"
# In a SLURM step: how many of its last tasks are parameter servers; the first task of all is then the coordinator.
PS = "TFDISTKIT_PS"
# In a SLURM step: the port of the first task on each host, instead of one made of the job's and the step's number.
PORT = "TFDISTKIT_PORT"
# "1": compare every collective of user code between the ranks before it runs; "0": none (default: the first ones).
CHECK_COLLECTIVES = "TFDISTKIT_CHECK_COLLECTIVES"
# "1": processes of a job may train and evaluate models that are in no strategy of it, each its own.
OWN_MODELS = "TFDISTKIT_OWN_MODELS"
# "1": tracebacks of workers show the frames of Keras, TensorFlow and this package, too.
FULL_TRACEBACK = "TFDISTKIT_FULL_TRACEBACK"
# The folder for what takes long to make and can be made again (built wheels).
CACHE_DIR = "TFDISTKIT_CACHE_DIR"
# The user's folder for such things: https://specifications.freedesktop.org/basedir-spec/latest/
XDG_CACHE_HOME = "XDG_CACHE_HOME"
# Kubernetes sets this in every container: https://kubernetes.io/docs/concepts/services-networking/service/
KUBERNETES = "KUBERNETES_SERVICE_HOST"

# All that a launcher tells a worker, besides TF_CONFIG.
LETTERBOX = (LOCAL_RANK, LOCAL_WORLD_SIZE, RUN_DIR, TASK_DIR, PARENT_PID, RANK, ATTEMPT, JOB_ID, SECRET)

# TensorFlow reads these two when it makes its thread pools.
INTRA_OP_THREADS = "TF_NUM_INTRAOP_THREADS"
INTER_OP_THREADS = "TF_NUM_INTEROP_THREADS"
OMP_THREADS = "OMP_NUM_THREADS"
# What TensorFlow's C++ code logs: from which severity on (0: all), and how much more.
TF_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
TF_VLOG_LEVEL = "TF_CPP_MAX_VLOG_LEVEL"
TF_VMODULE = "TF_CPP_VMODULE"
# Whether colours are wanted, wherever the output goes: https://no-color.org, https://force-color.org
NO_COLOR = "NO_COLOR"
FORCE_COLOR = "FORCE_COLOR"
# Python writes what is printed at once.
UNBUFFERED = "PYTHONUNBUFFERED"


def text(name: str) -> str | None:
    """Returns the value of a variable, or None when it is unset or empty."""
    return os.environ.get(name) or None


def integer(name: str) -> int | None:
    """Returns a variable as an integer, or None when it is unset or empty.

    Raises:
        ClusterConfigError: if the variable holds something else.
    """
    value = text(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise ClusterConfigError(
            explain(f"The environment variable `{name}` is not a number.", received=repr(value), expected="an integer")
        ) from None


def checks_own_address() -> bool:
    """Whether a process's own address must be one of this machine: not in Kubernetes, not if switched off."""
    return text(CHECK_ADDRESS) != "0" and text(KUBERNETES) is None


def cache_dir() -> Path:
    """Returns the folder for what takes long to make and can be made again; nothing is made yet."""
    own = text(CACHE_DIR)
    if own is not None:
        return Path(own).absolute()
    return Path(text(XDG_CACHE_HOME) or Path.home() / ".cache") / "tfdistkit"


def put(name: str, value: str) -> None:
    """Sets a variable of this process, for a library that reads it later (Horovod when it is initialised)."""
    os.environ[name] = value


def child_env(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Returns a copy of this process's environment with `changes` made; None removes a variable."""
    result = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result
