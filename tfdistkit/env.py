"""Reads and writes environment variables; no other module does.

The launcher talks to the workers through these variables (down), and they to it through files in the run folder
(up). So any other launcher can replace ours by setting the same names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tfdistkit.errors import ClusterConfigError, explain

# TensorFlow's own description of a cluster: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
TF_CONFIG = "TF_CONFIG"

# Rank among the workers of this host, and their number: CUDA devices are assigned by the local rank.
LOCAL_RANK = "TFDISTKIT_LOCAL_RANK"
LOCAL_WORLD_SIZE = "TFDISTKIT_LOCAL_WORLD_SIZE"
# The folder of this run: logs, events, error files.
RUN_DIR = "TFDISTKIT_RUN_DIR"
# Process id of the launcher: the worker exits when the launcher does.
PARENT_PID = "TFDISTKIT_PARENT_PID"
# This process's folder in the run folder: its output, its crash record.
TASK_DIR = "TFDISTKIT_TASK_DIR"
# Index of this process within its role, for logs and error files (training uses `tfdistkit.rank()`).
RANK = "TFDISTKIT_RANK"
# Number of restarts of the job so far, from 0 (TORCHELASTIC_RESTART_COUNT of torchrun).
ATTEMPT = "TFDISTKIT_ATTEMPT"
# The fewest and the most workers of an elastic job, as `2:4`; unset where their number is fixed.
ELASTIC = "TFDISTKIT_ELASTIC"
# Unique id of the job: all descendants of a worker inherit it, so the launcher finds and ends every one of them.
JOB_ID = "TFDISTKIT_JOB_ID"
# Shared secret of the job: processes authenticate each other with it before they exchange data.
SECRET = "TFDISTKIT_SECRET"
# "0": do not require this process's own address to be one of this machine (network address translation).
CHECK_ADDRESS = "TFDISTKIT_CHECK_ADDRESS"
# The reader to take the cluster from, where several find one (`tfdistkit env` lists them); "single": a single process.
CLUSTER = "TFDISTKIT_CLUSTER"
# In a SLURM step: the last so many tasks are parameter servers, and the first task is the coordinator.
PS = "TFDISTKIT_PS"
# In a SLURM step: the port of the first task on each host; the default derives from the job id and the step id.
PORT = "TFDISTKIT_PORT"
# "1": compare every collective of user code across ranks before it runs; "0": none (default: the first ones).
CHECK_COLLECTIVES = "TFDISTKIT_CHECK_COLLECTIVES"
# What `communication="auto"` of the strategy `multiworker` is, such as "shm" or "ring"; the same on all ranks.
COMMUNICATION = "TFDISTKIT_COMMUNICATION"
# "1": each process of a job may train and evaluate models of its own, outside any strategy of the job.
OWN_MODELS = "TFDISTKIT_OWN_MODELS"
# "1": tracebacks of workers include the frames of Keras, TensorFlow and this package.
FULL_TRACEBACK = "TFDISTKIT_FULL_TRACEBACK"
# Cache folder (built wheels).
CACHE_DIR = "TFDISTKIT_CACHE_DIR"
# The user's cache folder: https://specifications.freedesktop.org/basedir-spec/latest/
XDG_CACHE_HOME = "XDG_CACHE_HOME"
# Kubernetes sets this in every container: https://kubernetes.io/docs/concepts/services-networking/service/
KUBERNETES = "KUBERNETES_SERVICE_HOST"

# All variables that the launcher sets for a worker, besides TF_CONFIG.
LETTERBOX = (LOCAL_RANK, LOCAL_WORLD_SIZE, RUN_DIR, TASK_DIR, PARENT_PID, RANK, ATTEMPT, ELASTIC, JOB_ID, SECRET)

# TensorFlow reads the first two when it creates its thread pools.
INTRA_OP_THREADS = "TF_NUM_INTRAOP_THREADS"
INTER_OP_THREADS = "TF_NUM_INTEROP_THREADS"
OMP_THREADS = "OMP_NUM_THREADS"
# Logging of TensorFlow's C++ code: minimum severity (0: all), and verbosity.
TF_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
TF_VLOG_LEVEL = "TF_CPP_MAX_VLOG_LEVEL"
TF_VMODULE = "TF_CPP_VMODULE"
# Switch colours off or on, whatever the output is: https://no-color.org, https://force-color.org
NO_COLOR = "NO_COLOR"
FORCE_COLOR = "FORCE_COLOR"
# Python flushes each line of output.
UNBUFFERED = "PYTHONUNBUFFERED"


def text(name: str) -> str | None:
    """Returns the value of a variable, or None if it is unset or empty."""
    return os.environ.get(name) or None


def integer(name: str) -> int | None:
    """Returns a variable as an integer, or None if it is unset or empty.

    Raises:
        ClusterConfigError: if the value is not an integer.
    """
    value = text(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise ClusterConfigError(
            explain(f"The environment variable `{name}` must be an integer.", received=repr(value))
        ) from None


def checks_own_address() -> bool:
    """Returns whether a process's own address must be one of this machine: not in Kubernetes, nor if switched off."""
    return text(CHECK_ADDRESS) != "0" and text(KUBERNETES) is None


def job() -> str | None:
    """Returns the id of the job, the same on all hosts and in all attempts; None without a launcher."""
    mark = text(JOB_ID)
    # Agents add the number of their host.
    return mark and mark.partition(".")[0]


def cache_dir() -> Path:
    """Returns the path of the cache folder, without creating it."""
    own = text(CACHE_DIR)
    if own is not None:
        return Path(own).absolute()
    return Path(text(XDG_CACHE_HOME) or Path.home() / ".cache") / "tfdistkit"


def put(name: str, value: str) -> None:
    """Sets a variable of this process for a library that reads it later (Horovod during `init`)."""
    os.environ[name] = value


def child_env(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Returns a copy of this process's environment with `changes` applied; None removes a variable."""
    result = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result
