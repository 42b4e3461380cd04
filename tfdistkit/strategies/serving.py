"""What a worker or a parameter server does: it serves the coordinator, and ends with it."""

from __future__ import annotations

import sys
import time
from typing import NoReturn

import tensorflow as tf
from absl import logging

from tfdistkit import env
from tfdistkit.cluster.liveness import Sign, look
from tfdistkit.cluster.own_address import check_own_address
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import RendezvousError, explain
from tfdistkit.strategies.devices import require_not_started, take_gpu_of_local_rank

# Seconds that a coordinator may be gone: one that starts again within them finds its servers.
_GRACE_S = 10.0
_EVERY_S = 0.5
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
    _watch(cluster.addresses["chief"][0], timeout_s, f"{task.role} {task.index}")
    sys.exit(0)


def _watch(address: str, timeout_s: float, who: str) -> None:
    """Returns when the coordinator was there and is gone."""
    deadline = time.monotonic() + timeout_s
    seen = False
    while True:
        if look(address, 5.0) is not Sign.GONE:
            seen, deadline = True, time.monotonic() + _GRACE_S
        elif time.monotonic() > deadline:
            if seen:
                return
            raise RendezvousError(
                explain(
                    f"The coordinator did not come within {timeout_s:g} seconds (`timeout_s`).",
                    received=f"nothing listens at {address}, the address of the chief",
                    expected="a process with the task type 'chief' there",
                    do=f"Look at the log of the chief; {who} waited for it.",
                )
            )
        time.sleep(_EVERY_S)
