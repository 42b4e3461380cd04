"""Runs a rendezvous of all training processes before any of them starts TensorFlow's server.

TensorFlow waits silently for minutes if processes are missing, or disagree on the cluster. So the processes first
exchange facts over plain sockets, at rank 0's address: the port that TensorFlow's server takes afterwards, so that no
other port must be open. All processes get the same result, or the same error.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from tfdistkit.cluster.rendezvous.client import Client
from tfdistkit.cluster.rendezvous.protocol import LONGEST_WAIT_S, Facts, Hello, are_facts
from tfdistkit.cluster.rendezvous.server import Server
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, OptionError, explain
from tfdistkit.validation import require_positive

# Default of all strategies: long enough for a scheduler that starts the hosts of a job one by one, short enough
# to waste no paid hours.
DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Rendezvous:
    """Holds the result of a rendezvous.

    Args:
        facts: The facts of every process, in rank order.
        waited_s: The seconds that this process spent in the rendezvous.
    """

    facts: tuple[Facts, ...]
    waited_s: float


def exchange_facts(spec: ClusterSpec, facts: Mapping[str, str | int], timeout_s: float) -> Rendezvous:
    """Waits until every training process of the job has joined, and exchanges facts between them.

    On return, rank 0's port is free for TensorFlow's server. The facts `tensorflow`, `keras` and `tfdistkit` are
    versions that must be equal on all ranks; other facts may differ.

    Args:
        spec: The cluster; a single process waits for no peers.
        facts: The facts of this process for its peers: versions, a proposal for a seed.
        timeout_s: The timeout in seconds. The job fails at the earliest deadline of the processes that joined.

    Returns:
        The facts of all ranks.

    Raises:
        RendezvousError: if the timeout passed; the message names the ranks that are missing or unreachable.
        ClusterConfigError: if the processes contradict each other (a duplicate rank, different addresses or versions),
            or this process's port is taken.
        OptionError: if `timeout_s` is not a positive number, or a fact is neither text nor an integer.
    """
    _check_arguments(spec, facts, timeout_s)
    timeout_s = min(timeout_s, LONGEST_WAIT_S)
    start = time.monotonic()
    hello = Hello(
        rank=spec.rank,
        addresses=spec.workers,
        facts=dict(facts),
        host=socket.gethostname(),
        pid=os.getpid(),
        token=uuid.uuid4().hex,
        remaining_s=timeout_s,
    )
    all_facts: tuple[Facts, ...] = (hello.facts,)
    if spec.world_size > 1:
        role = Server if spec.rank == 0 else Client
        all_facts = role(spec, hello, start + timeout_s).run()
    return Rendezvous(all_facts, time.monotonic() - start)


def _check_arguments(spec: ClusterSpec, facts: Mapping[str, str | int], timeout_s: float) -> None:
    require_positive("timeout_s", timeout_s, "seconds")
    if not are_facts(dict(facts)):
        what = "`facts` must map names to text or integers."
        raise OptionError(explain(what, received=repr(dict(facts))))
    if not spec.is_complete:
        missing = ", ".join(str(rank) for rank, address in enumerate(spec.workers) if not address)
        what = f"{spec.source} must list the addresses of all training processes."
        do = "List the address of every chief and worker: synchronous training needs all of them."
        raise ClusterConfigError(explain(what, received=f"no address of rank {missing}", do=do))
