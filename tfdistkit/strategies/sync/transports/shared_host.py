"""Decides which ranks of a job share a host, and connects them over its memory."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdistkit.cluster.rendezvous.validation import require_same_options
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.collectives.shm import engine, peers
from tfdistkit.collectives.shm.transport import SharedMemoryTransport
from tfdistkit.communication.buckets import FUSION_BYTES
from tfdistkit.communication.reducer import needs_hosts
from tfdistkit.errors import ClusterConfigError, OptionError, UnsupportedError, explain

_LOG = logging.getLogger(__name__)

# The options that must be the same on all ranks.
_OPTIONS = ("communication", "reducer", "fusion_bytes")


@dataclass
class Offer:
    """The options and the address that a rank sends to its peers before it starts.

    Args:
        communication: The option of this rank.
        reducer: The description of its reducer.
        listener: Accepts connections of its peers on this host; None if it cannot be reached.
        fusion_bytes: The option of this rank.
        needs_hosts: Whether its reducer needs several hosts (`Reducer.needs_hosts`).
    """

    communication: str
    reducer: str
    listener: peers.Listener | None
    fusion_bytes: int = FUSION_BYTES
    needs_hosts: bool = False

    @property
    def facts(self) -> dict[str, str | int]:
        """Returns the facts for its peers."""
        place = {} if self.listener is None else {peers.FACT: self.listener.place}
        return {**dict(zip(_OPTIONS, (self.communication, self.reducer, self.fusion_bytes))), **place}

    def close(self) -> None:
        """Withdraws the offer."""
        if self.listener is not None:
            self.listener.close()


def offer(communication: str, reducer: str, fusion_bytes: int = FUSION_BYTES, needs_hosts: bool = False) -> Offer:
    """Makes the offer of this rank.

    Args:
        communication: The option; with `"ring"` and `"nccl"` no memory is shared, and neither are GPUs' results.
        reducer: What describes the reducer (`Reducer.describe`).
        fusion_bytes: The option.
        needs_hosts: Whether the reducer sends otherwise within a host than between hosts.
    """
    has_gpus = bool(tf.config.list_physical_devices("GPU"))
    wants_it = communication in ("shm", "hierarchical") or (communication == "auto" and not has_gpus)
    return Offer(communication, reducer, peers.listen() if wants_it else None, fusion_bytes, needs_hosts)


@dataclass
class Shared:
    """The connection between the ranks of this host.

    Args:
        transport: Moves tensors between them; None if this rank is alone on its host.
        hosts: The ranks of each host, in rank order.
    """

    transport: SharedMemoryTransport | None
    hosts: list[list[int]]


def share(
    own: Offer, cluster: ClusterSpec, facts: Sequence[Mapping[str, str | int]], timeout_s: float
) -> Shared | None:
    """Connects the ranks of each host over its memory; all ranks decide alike.

    Args:
        own: The offer of this rank.
        cluster: Which rank this is.
        facts: The facts of all ranks, in rank order.
        timeout_s: Seconds to wait for the others, now and in every operation.

    Returns:
        The connection; None if no two ranks share memory, or if the options say so.

    Raises:
        OptionError: if the ranks have different options.
        ClusterConfigError: if shared memory was asked for, and the ranks are not placed as it needs them.
        UnsupportedError: if a reducer needs to know which ranks share a host, and they cannot tell.
        RendezvousError: if a rank does not connect.
    """
    try:
        require_same_options(facts, _OPTIONS)
        hosts = peers.ranks_of_hosts(facts)
        _require_placement(own, facts, hosts)
    except (OptionError, ClusterConfigError, UnsupportedError):
        own.close()
        raise
    is_possible = all(peers.FACT in one for one in facts)
    if own.needs_hosts and len(hosts) == len(facts):
        own.close()
        return Shared(None, hosts)
    if not is_possible or len(hosts) == len(facts):
        own.close()
        if len(hosts) == len(facts) and is_possible and own.communication == "auto" and cluster.is_chief:
            _suggest_horovod(len(hosts))
        return None
    [ranks] = [ranks for ranks in hosts if cluster.rank in ranks]
    if len(ranks) == 1:
        own.close()
        return Shared(None, hosts)
    return Shared(_connect(own, cluster.rank, facts, timeout_s, ranks, is_all=len(hosts) == 1), hosts)


def _suggest_horovod(hosts: int) -> None:
    """Logs a line if Horovod, which is installed, would be faster: see "Two hosts" in benchmarks/README.md."""
    if importlib.util.find_spec("horovod") is not None:
        _LOG.warning(
            "%d workers on as many hosts communicate over TensorFlow's ring. Horovod is installed, and was faster in "
            'our measurements: try tfdistkit.strategy("horovod") and `tfdistkit run --backend horovod`. '
            '(communication="ring" hides this line.)',
            hosts,
        )


def _connect(
    own: Offer,
    rank: int,
    facts: Sequence[Mapping[str, str | int]],
    timeout_s: float,
    ranks: Sequence[int],
    is_all: bool,
) -> SharedMemoryTransport:
    assert own.listener is not None
    connected = peers.connect(own.listener, rank, facts, timeout_s, ranks)
    memory = peers.share_memory(ranks.index(rank), connected, engine.CHUNKS * engine.CHUNK_BYTES)
    # The first rank of a host may wait for other hosts, and another for it, each in another operation.
    apart_s = None if is_all else math.inf
    running = engine.Engine(ranks.index(rank), connected, memory, ranks, apart_s)
    atexit.register(running.close)  # Before TensorFlow shuts down.
    return SharedMemoryTransport(running, timeout_s)


def _require_placement(own: Offer, facts: Sequence[Mapping[str, str | int]], hosts: Sequence[Sequence[int]]) -> None:
    """Requires ranks where the reducer needs them, and `communication`, if it was given by name."""
    if own.needs_hosts:
        _require_several_hosts(own, facts, hosts)
    if own.communication == "shm" and len(hosts) > 1:
        raise _cannot_share(facts, hosts)
    if own.communication == "hierarchical" and len(hosts) == 1:
        raise ClusterConfigError(
            explain(
                '`communication="hierarchical"` needs ranks on several hosts.',
                received=f"{len(facts)} ranks on one host",
                do='Use communication="shm" or "auto".',
            )
        )
    if own.communication == "hierarchical" and not all(peers.FACT in one for one in facts):
        without = [str(rank) for rank, one in enumerate(facts) if peers.FACT not in one]
        raise ClusterConfigError(
            explain(
                '`communication="hierarchical"` needs Linux on all hosts.',
                received=f"no shared memory on the system of rank {', '.join(without)}",
                do='Use communication="auto", which takes what the ranks have in common.',
            )
        )


def _require_several_hosts(
    own: Offer, facts: Sequence[Mapping[str, str | int]], hosts: Sequence[Sequence[int]]
) -> None:
    if not all(peers.FACT in one for one in facts):
        without = [str(rank) for rank, one in enumerate(facts) if peers.FACT not in one]
        raise needs_hosts(f"no shared memory on the system of rank {', '.join(without)}")
    if len(hosts) == 1:
        raise ClusterConfigError(
            explain(
                "Hierarchical needs ranks on several hosts: on one host nothing would travel as `across` says.",
                received=f"{len(facts)} ranks on one host, algorithm={own.reducer}",
                do="Leave `algorithm` out, which trains synchronously, or use tfdistkit.algorithms.LocalSGD(50).",
            )
        )


def _cannot_share(facts: Sequence[Mapping[str, str | int]], hosts: Sequence[Sequence[int]]) -> ClusterConfigError:
    apart = [str(rank) for rank in range(len(facts)) if rank not in hosts[0]]
    return ClusterConfigError(
        explain(
            '`communication="shm"` needs all ranks on one Linux host, of one user, in one network namespace.',
            received=f"rank 0 and rank {', '.join(apart)} apart"
            if all(peers.FACT in one for one in facts)
            else "no shared memory on this system",
            do='Use communication="auto", which takes what the ranks have in common.',
        )
    )
