"""Runs a worker or a parameter server: it serves the coordinator, and exits after it.

A coordinator that exits normally ends its tasks at once (`dismiss`). After a coordinator that was killed, the tasks
wait for a restart of it. Under our launcher the wait is short: the launcher ends all tasks, and starts them again. When
all tasks receive a signal to end, workers and servers go on until the coordinator has exited, because it may write a
last backup of their variables.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import NoReturn

import tensorflow as tf
from absl import logging

from tfdistkit import env
from tfdistkit.cluster.liveness import Sign, look
from tfdistkit.cluster.own_address import check_own_address
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import RendezvousError, explain
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import Phase
from tfdistkit.strategies.devices import require_not_started, take_gpu_of_local_rank

# Seconds to wait for the restart of a coordinator that is gone.
_GRACE_S = 60.0
# The same under our launcher, which restarts all tasks, and stops those that remain.
_GRACE_UNDER_LAUNCHER_S = 10.0
# Seconds to wait for a silent coordinator: a stopped process, or a machine that is gone.
_SILENT_GRACE_S = 600.0
# Seconds to go on after a signal, while the coordinator lives: the time of its last backup (`BackupAndResume`).
_BACKUP_GRACE_S = 25.0
# A coordinator that was alive this many seconds before a signal counts as alive when the signal came.
_JUST_BEFORE_S = 2.0
# Timeout, in seconds, for ending all tasks.
_DISMISSAL_S = 3.0
_POLL_EVERY_S = 0.5
# Timeout, in seconds, of one liveness probe of the coordinator.
_PROBE_TIMEOUT_S = 5.0
# A step holds a thread of a worker while it waits for a server, and the other way round.
_FEWEST_INTER_OP_THREADS = 4


def serve(cluster: ClusterSpec, timeout_s: float) -> NoReturn:
    """Serves the coordinator until it is gone; then exits with code 0.

    Args:
        cluster: Which process this is, and the addresses of all.
        timeout_s: Seconds to wait for the coordinator.

    Raises:
        SystemExit: with code 0, when the coordinator is gone.
        RendezvousError: if the coordinator is not reachable within `timeout_s`.
        ClusterConfigError: if this process cannot bind its address.
    """
    task = cluster.task
    require_not_started(f"{task.role} {task.index}")
    check_own_address(cluster)
    if task.role == "worker":
        take_gpu_of_local_rank(cluster)
    else:
        tf.config.set_visible_devices([], "GPU")
    # Makes gRPC fail at once for a task that is gone, instead of retrying for minutes.
    env.put("GRPC_FAIL_FAST", "use_caller")
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=env.integer(env.INTRA_OP_THREADS) or 0,
        inter_op_parallelism_threads=max(_FEWEST_INTER_OP_THREADS, env.integer(env.INTER_OP_THREADS) or 0),
    )
    # Kept in a variable: the server stops when it is garbage-collected.
    server = tf.distribute.Server(
        tf.train.ClusterSpec({role: list(addresses) for role, addresses in cluster.addresses.items()}),
        job_name=task.role, task_index=task.index, protocol="grpc", config=config,
    )  # fmt: skip
    logging.info("%s %d serves at %s", task.role, task.index, server.target)
    # `dismiss` ends this process from a thread of TensorFlow's, without a flush.
    sys.stdout.flush()
    sys.stderr.flush()
    signals = _EndSignals()
    signals.listen()
    notes.own.enter(Phase.SERVING)
    _watch(cluster.addresses["chief"][0], timeout_s, f"{task.role} {task.index}", signals)
    sys.exit(0)


class _EndSignals:
    """Records the last signal that asks this process to end, and when it came."""

    def __init__(self) -> None:
        self._number = 0
        self._at = 0.0

    def listen(self) -> None:
        """Installs handlers for the signals of schedulers; ignored signals stay ignored."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self.take)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Records a signal."""
        self._number, self._at = number, time.monotonic()

    def should_stop(self, sign: Sign, alive_at: float | None) -> bool:
        """Returns whether to exit after a signal because the coordinator has just ended.

        Ends this process by the signal if the coordinator outlives the grace period, or was gone before the signal.

        Args:
            sign: The coordinator's sign of life now.
            alive_at: When it was last alive.
        """
        if not self._number or (sign is Sign.ALIVE and time.monotonic() - self._at < _BACKUP_GRACE_S):
            return False
        if sign is Sign.GONE and alive_at is not None and alive_at > self._at - _JUST_BEFORE_S:
            return True
        signal.signal(self._number, signal.SIG_DFL)
        os.kill(os.getpid(), self._number)
        return True


def _watch(address: str, timeout_s: float, task: str, signals: _EndSignals) -> None:
    """Polls the coordinator; returns when it was alive and is gone."""
    patience = {Sign.GONE: _GRACE_S, Sign.SILENT: _SILENT_GRACE_S}
    if _has_launcher():
        patience[Sign.GONE] = _GRACE_UNDER_LAUNCHER_S
    deadline = time.monotonic() + timeout_s
    alive_at: float | None = None
    while True:
        sign, now = look(address, _PROBE_TIMEOUT_S), time.monotonic()
        if sign is Sign.ALIVE:
            alive_at = now
        if signals.should_stop(sign, alive_at):
            return
        if alive_at is not None and now - alive_at > patience.get(sign, 0.0):
            return
        if alive_at is None and now > deadline:
            raise RendezvousError(
                explain(
                    f"The coordinator was not reachable within {timeout_s:g} seconds (`timeout_s`).",
                    received=f"the chief at {address}: {sign.value}",
                    expected="a process with the task type 'chief' at that address",
                    do=f"Look at the log of the chief; {task} waited for it.",
                )
            )
        time.sleep(_POLL_EVERY_S)


def _has_launcher() -> bool:
    return env.text(env.PARENT_PID) is not None


def dismiss(tasks: Iterable[str]) -> None:
    """Ends workers and servers with exit code 0; called by the coordinator when it exits.

    Does nothing after an unhandled exception: the coordinator may be restarted, and then needs its tasks.

    Args:
        tasks: Names of live tasks, such as `/job:worker/replica:0/task:0`.
    """
    if _has_launcher() or hasattr(sys, "last_value"):
        return
    # One thread each, so that a task that does not answer does not delay the others.
    threads = [threading.Thread(target=_end, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _DISMISSAL_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _end(task: str) -> None:
    try:
        with tf.device(f"{task}/device:CPU:0"):
            tf.raw_ops.Abort(error_msg="", exit_without_error=True)
    except tf.errors.OpError:
        pass  # It exited before it could answer.
