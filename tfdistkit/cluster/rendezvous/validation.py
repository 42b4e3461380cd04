"""What can be wrong with a rendezvous: pure functions from what the processes said to the error for everybody."""

from __future__ import annotations

from collections.abc import Sequence

from tfdistkit.cluster.rendezvous.protocol import Facts, Hello, printable
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, RendezvousError, explain

# Versions that decide what the processes compute and send each other.
MUST_AGREE = ("tensorflow", "keras", "tfdistkit")
# A message names so many ranks or addresses; of more it gives the number.
_MOST_NAMED = 16


def contradiction(own: Hello, other: Hello, twin: Hello | None) -> ClusterConfigError | None:
    """Compares what a process says with what rank 0 knows.

    Args:
        own: What rank 0 itself says.
        other: What the process says.
        twin: What another process said that came earlier with the same rank, and is still there.

    Returns:
        The error for everybody, or None when all is well.
    """
    who = f"Rank {other.rank} (pid {other.pid} on {printable(other.host)})"
    if len(other.addresses) != len(own.addresses):
        what = f"{who} and rank 0 do not agree on the number of training processes."
        return _disagreement(what, f"{len(other.addresses)} there: {_list(other.addresses)}", own)
    if list(map(str.lower, other.addresses)) != list(map(str.lower, own.addresses)):
        what = f"{who} and rank 0 have different lists of addresses."
        return _disagreement(what, f"there: {_list(other.addresses)}{_first_difference(own, other)}", own)
    if other.rank == 0:
        twin = own
    if twin is not None:
        what = f"Two processes say that they are rank {other.rank}."
        received = f"pid {twin.pid} on {printable(twin.host)}, and pid {other.pid} on {printable(other.host)}"
        do = "Give each process its own task index."
        return ClusterConfigError(explain(what, received=received, expected="one process for each rank", do=do))
    if not 0 < other.rank < len(own.addresses):
        what = f"{who} is not one of the {len(own.addresses)} training processes."
        return ClusterConfigError(explain(what, expected=f"a rank from 1 to {len(own.addresses) - 1}"))
    return None


def other_protocol(own: Hello, peer: str) -> ClusterConfigError:
    """Says that another version of this package came to rank 0.

    Args:
        own: What rank 0 itself says.
        peer: Where the other one connects from.
    """
    what = f"The process at {peer} has a version of tfdistkit that does not understand that of rank 0."
    received = f"{own.facts.get('tfdistkit', 'unknown')} on rank 0, another one there"
    return ClusterConfigError(explain(what, received=received, expected="the same version of tfdistkit everywhere"))


def _disagreement(what: str, received: str, own: Hello) -> ClusterConfigError:
    expected = f"as on rank 0: {len(own.addresses)} training processes, {_list(own.addresses)}"
    do = "Give every process the same `cluster` in TF_CONFIG; only `task` differs."
    return ClusterConfigError(explain(what, received=received, expected=expected, do=do))


def _first_difference(own: Hello, other: Hello) -> str:
    for rank, (here, there) in enumerate(zip(own.addresses, other.addresses, strict=True)):
        if here.lower() != there.lower():
            return f" (the first difference: rank {rank} is {printable(there)} there, {here} on rank 0)"
    return ""


def _list(addresses: Sequence[str]) -> str:
    more = f", ... ({len(addresses)} in all)" if len(addresses) > _MOST_NAMED else ""
    return f"[{printable(', '.join(addresses[:_MOST_NAMED]))}{more}]"


def version_difference(facts: Sequence[Facts]) -> ClusterConfigError | None:
    """Finds versions that must agree and do not.

    Args:
        facts: The facts of every rank, in rank order.

    Returns:
        An error with a table of all ranks, or None when they agree.
    """
    differing = [name for name in MUST_AGREE if len({one.get(name) for one in facts}) > 1]
    if not differing:
        return None
    rows = [["rank", *differing]]
    rows += [[str(rank), *(printable(str(one.get(name, "-"))) for name in differing)] for rank, one in enumerate(facts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    what = f"The processes have different versions of {' and '.join(differing)}."
    do = "Install the same versions everywhere:\n  " + "\n  ".join(table)
    return ClusterConfigError(explain(what, expected="the same on every rank", do=do))


def missing_error(
    spec: ClusterSpec, missing: Sequence[int], asleep: Sequence[int], waited_s: float, intruders: Sequence[str]
) -> RendezvousError:
    """Says who did not come to a rendezvous.

    Args:
        spec: The cluster.
        missing: The ranks that are not there.
        asleep: The ranks that came, but do not answer any more.
        waited_s: How long rank 0 has waited.
        intruders: What else came to rank 0's port.

    Returns:
        The error for everybody.
    """
    parts = []
    if missing:
        parts.append(f"{name_ranks(spec, missing)} did not come")
    if asleep:
        parts.append(f"{name_ranks(spec, asleep)} came, but no longer answered")
    what = f"Not all {spec.world_size} training processes met within {waited_s:.1f} s: {'; '.join(parts)}."
    if intruders:
        what += f" Strangers came to rank 0's port: {'; '.join(intruders)}."
    do = (
        f"Look at the logs of these ranks: were they started, are they stopped, may their machines connect to "
        f"{spec.workers[0]}? If they only need longer to start, raise `timeout_s`."
    )
    return RendezvousError(explain(what, do=do))


def name_ranks(spec: ClusterSpec, ranks: Sequence[int]) -> str:
    """Returns `rank 1 (host1:12345), rank 2 (host2:12345)`, shortened when there are many."""
    named = ", ".join(f"rank {rank} ({spec.workers[rank]})" for rank in sorted(ranks)[:_MOST_NAMED])
    more = len(ranks) - _MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named
