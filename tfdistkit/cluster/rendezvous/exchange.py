"""A rendezvous of all training processes before any of them starts TensorFlow's server.

A TensorFlow job whose processes do not all come, or come with different ideas of the cluster, waits silently
for minutes. So they meet first, over plain sockets, at rank 0's address: the very port that TensorFlow's
server takes afterwards, so no other port needs to be open. Everybody hears the same outcome.
"""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from tfdistkit.cluster.rendezvous.client import Guest
from tfdistkit.cluster.rendezvous.protocol import LONGEST_WAIT_S, Facts, Hello, are_facts
from tfdistkit.cluster.rendezvous.server import Host
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, OptionError, explain


@dataclass(frozen=True)
class Rendezvous:
    """What came out of a rendezvous.

    Args:
        facts: The facts of every process, in rank order.
        waited_s: How many seconds this process spent in the rendezvous.
    """

    facts: tuple[Facts, ...]
    waited_s: float


def exchange_facts(spec: ClusterSpec, facts: Mapping[str, str | int], timeout_s: float) -> Rendezvous:
    """Waits until every training process of the job is there, and tells each what the others said.

    When it returns, rank 0's port is free again at once, for TensorFlow's server. The facts named
    `tensorflow`, `keras` and `tfdistkit` are versions that must agree; the others may differ.

    Args:
        spec: The cluster; a single process meets nobody.
        facts: What the others shall know of this process: versions, a proposal for a seed.
        timeout_s: The deadline in seconds. The job fails at the earliest deadline of those who came.

    Returns:
        The facts of all ranks.

    Raises:
        RendezvousError: if the deadline passed; the message names who is missing or cannot be reached.
        ClusterConfigError: if the processes contradict each other: one rank twice, another list of addresses,
            other versions; or if this process's port is taken.
        OptionError: if `timeout_s` is not a positive number, or a fact is neither text nor a whole number.
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
    everyone: tuple[Facts, ...] = (hello.facts,)
    if spec.world_size > 1:
        role = Host if spec.rank == 0 else Guest
        everyone = role(spec, hello, start + timeout_s).run()
    return Rendezvous(everyone, time.monotonic() - start)


def _check_arguments(spec: ClusterSpec, facts: Mapping[str, str | int], timeout_s: float) -> None:
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        what = "`timeout_s` is not a positive number of seconds."
        raise OptionError(explain(what, received=f"timeout_s={timeout_s}", expected="a number above 0"))
    if not are_facts(dict(facts)):
        what = "`facts` holds something that is neither text nor a whole number."
        raise OptionError(explain(what, received=repr(dict(facts)), expected="names with texts or whole numbers"))
    if not spec.is_complete:
        missing = ", ".join(str(rank) for rank, address in enumerate(spec.workers) if not address)
        what = f"{spec.source} does not tell the addresses of all training processes."
        do = "List them all: synchronous training needs to know everybody."
        raise ClusterConfigError(explain(what, received=f"no address of rank {missing}", do=do))
