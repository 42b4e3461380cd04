"""What a worker or a parameter server does: it serves the coordinator, and ends with it.

A coordinator that ends well ends the others at once (`dismiss`). Of one that was killed they wait a while for the
next, which somebody may start. Under our launcher they need not: it ends them, and starts all again. When all are told
to end, they go on until the coordinator has ended: it may make a last backup of what they hold.
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
from tfdistkit.strategies.devices import require_not_started, take_gpu_of_local_rank

# Seconds that a coordinator may be gone: one that starts again within them, slow to load, finds its servers.
_GRACE_S = 60.0
# The same under our launcher, which starts all of them again, and stops those that stay.
_GRACE_UNDER_LAUNCHER_S = 10.0
# Seconds that a coordinator may be silent: somebody stopped it, or its machine is gone.
_SILENT_GRACE_S = 600.0
# Seconds to go on after a signal, while the coordinator lives; it has as many for its last backup (`BackupAndResume`).
_BACKUP_GRACE_S = 25.0
# One that was seen alive so many seconds before the signal was there when it came.
_JUST_BEFORE_S = 2.0
# Seconds for all tasks to hear that the coordinator is done.
_DISMISSAL_S = 3.0
_EVERY_S = 0.5
# Seconds that a coordinator has to answer a look at it.
_LOOK_S = 5.0
# A step holds a thread of a worker while it waits for a server, and the other way round.
_FEWEST_INTER_OP_THREADS = 4


def serve(cluster: ClusterSpec, timeout_s: float) -> NoReturn:
    """Serves the coordinator until it is gone; then ends this process with exit code 0.

    Args:
        cluster: Which process this is, and the addresses of all.
        timeout_s: Seconds to wait for the coordinator.

    Raises:
        SystemExit: with code 0, when the coordinator is gone.
        RendezvousError: if it does not come within `timeout_s`.
        ClusterConfigError: if this process cannot take its address.
    """
    task = cluster.task
    require_not_started(f"{task.role} {task.index}")
    check_own_address(cluster)
    if task.role == "worker":
        take_gpu_of_local_rank(cluster)
    else:
        tf.config.set_visible_devices([], "GPU")
    # A call to a task that is gone fails at once, and is not tried again for minutes.
    env.put("GRPC_FAIL_FAST", "use_caller")
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=env.integer(env.INTRA_OP_THREADS) or 0,
        inter_op_parallelism_threads=max(_FEWEST_INTER_OP_THREADS, env.integer(env.INTER_OP_THREADS) or 0),
    )
    # Held, for the server ends when nobody holds it.
    server = tf.distribute.Server(
        tf.train.ClusterSpec({role: list(addresses) for role, addresses in cluster.addresses.items()}),
        job_name=task.role, task_index=task.index, protocol="grpc", config=config,
    )  # fmt: skip
    logging.info("%s %d serves at %s", task.role, task.index, server.target)
    # `dismiss` ends this process from a thread of TensorFlow's.
    sys.stdout.flush()
    sys.stderr.flush()
    told = _ToldToEnd()
    told.listen()
    _watch(cluster.addresses["chief"][0], timeout_s, f"{task.role} {task.index}", told)
    sys.exit(0)


class _ToldToEnd:
    """A signal that asks this process to end, when it came."""

    def __init__(self) -> None:
        self._number = 0
        self._at = 0.0

    def listen(self) -> None:
        """Notes the signals of schedulers from now on; those that are ignored stay ignored."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self.take)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal."""
        self._number, self._at = number, time.monotonic()

    def obeyed(self, sign: Sign, alive_at: float | None) -> bool:
        """Whether it is time to end, for the coordinator has; ends this process by the signal if nobody needs it.

        Args:
            sign: What is seen of the coordinator now.
            alive_at: When it was seen alive for the last time.
        """
        if not self._number or (sign is Sign.ALIVE and time.monotonic() - self._at < _BACKUP_GRACE_S):
            return False
        if sign is Sign.GONE and alive_at is not None and alive_at > self._at - _JUST_BEFORE_S:
            return True
        signal.signal(self._number, signal.SIG_DFL)
        os.kill(os.getpid(), self._number)
        return True


def _watch(address: str, timeout_s: float, who: str, told: _ToldToEnd) -> None:
    """Returns when the coordinator was there and is gone."""
    patience = {Sign.GONE: _GRACE_S, Sign.SILENT: _SILENT_GRACE_S}
    if _has_launcher():
        patience[Sign.GONE] = _GRACE_UNDER_LAUNCHER_S
    deadline = time.monotonic() + timeout_s
    alive_at: float | None = None
    while True:
        sign, now = look(address, _LOOK_S), time.monotonic()
        if sign is Sign.ALIVE:
            alive_at = now
        if told.obeyed(sign, alive_at):
            return
        if alive_at is not None and now - alive_at > patience.get(sign, 0.0):
            return
        if alive_at is None and now > deadline:
            raise RendezvousError(
                explain(
                    f"The coordinator did not come within {timeout_s:g} seconds (`timeout_s`).",
                    received=f"the chief at {address}: {sign.value}",
                    expected="a process with the task type 'chief' there",
                    do=f"Look at the log of the chief; {who} waited for it.",
                )
            )
        time.sleep(_EVERY_S)


def _has_launcher() -> bool:
    return env.text(env.PARENT_PID) is not None


def dismiss(tasks: Iterable[str]) -> None:
    """Ends workers and servers with exit code 0. For the coordinator, when it ends.

    Does nothing after an unhandled exception: the coordinator may be started again, and will want them.

    Args:
        tasks: Such as `/job:worker/replica:0/task:0`; only those that are alive.
    """
    if _has_launcher() or hasattr(sys, "last_value"):
        return
    # One thread each: one that does not answer must not keep the others waiting.
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
        pass  # It ended before it could answer.
