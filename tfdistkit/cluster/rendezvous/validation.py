"""Checks the hellos and facts of a rendezvous, and makes the errors for all ranks; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdistkit.cluster.rendezvous.protocol import Facts, Hello, printable
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, OptionError, RendezvousError, explain

# Packages whose version decides what the processes compute and exchange.
MUST_AGREE = ("tensorflow", "keras", "tfdistkit")
# Most ranks or addresses that a message names.
_MOST_NAMED = 16
# Options of which one counts, whichever was given.
_AS_GIVEN = {"reducer": "`compression`, `algorithm` and `reducer`"}


def contradiction(own: Hello, other: Hello, twin: Hello | None) -> ClusterConfigError | None:
    """Compares the hello of a process with that of rank 0.

    Args:
        own: The hello of rank 0.
        other: The hello of the process.
        twin: The hello of another connected process with the same rank, or None.

    Returns:
        The error for all ranks, or None.
    """
    process = f"Rank {other.rank} (pid {other.pid} on {printable(other.host)})"
    if len(other.addresses) != len(own.addresses):
        what = f"{process} and rank 0 must have the same number of training processes."
        return _disagreement(what, f"{len(other.addresses)} there: {_list(other.addresses)}", own)
    if list(map(str.lower, other.addresses)) != list(map(str.lower, own.addresses)):
        what = f"{process} and rank 0 must have the same list of addresses."
        return _disagreement(what, f"there: {_list(other.addresses)}{_first_difference(own, other)}", own)
    if other.rank == 0:
        twin = own
    if twin is not None:
        what = f"Rank {other.rank} must be a single process."
        received = f"pid {twin.pid} on {printable(twin.host)}, and pid {other.pid} on {printable(other.host)}"
        do = "Give each process its own task index."
        return ClusterConfigError(explain(what, received=received, do=do))
    if not 0 < other.rank < len(own.addresses):
        what = f"{process} must have a rank from 1 to {len(own.addresses) - 1}."
        return ClusterConfigError(explain(what, received=str(other.rank), do="Correct its task index."))
    return None


def other_protocol(own: Hello, peer: str) -> ClusterConfigError:
    """Returns the error for a process with another version of this protocol.

    Args:
        own: The hello of rank 0.
        peer: The address of the other process.
    """
    what = f"The process at {peer} must have the same version of tfdistkit as rank 0."
    received = f"{own.facts.get('tfdistkit', 'unknown')} on rank 0, another one there"
    return ClusterConfigError(explain(what, received=received, do="Install the same version everywhere."))


def _disagreement(what: str, received: str, own: Hello) -> ClusterConfigError:
    expected = f"as on rank 0: {len(own.addresses)} training processes, {_list(own.addresses)}"
    do = "Give every process the same `cluster` in TF_CONFIG, and its own `task`."
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
    """Finds versions that must be equal on all ranks but differ.

    Args:
        facts: The facts of every rank, in rank order.

    Returns:
        An error with a table of all ranks, or None if they are equal.
    """
    differing = [name for name in MUST_AGREE if len({one.get(name) for one in facts}) > 1]
    if not differing:
        return None
    rows = [["rank", *differing]]
    rows += [[str(rank), *(printable(str(one.get(name, "-"))) for name in differing)] for rank, one in enumerate(facts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    what = f"All processes must have the same version of {' and '.join(differing)}."
    do = "Install the same versions everywhere:\n  " + "\n  ".join(table)
    return ClusterConfigError(explain(what, do=do))


def require_same_options(facts: Sequence[Mapping[str, str | int]], options: Sequence[str]) -> None:
    """Requires options of a strategy to be the same on all ranks.

    Args:
        facts: What each rank told, in rank order.
        options: The names of the options in them.

    Raises:
        OptionError: for the first that differs.
    """
    for option in options:
        given = [printable(str(one.get(option, ""))) for one in facts]
        if len(set(given)) > 1:
            received = "; ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(given[:_MOST_NAMED]))
            name = _AS_GIVEN.get(option, f"`{option}`")
            raise OptionError(explain(f"{name} must be the same on all ranks.", received=received))


def missing_error(
    spec: ClusterSpec, missing: Sequence[int], unresponsive: Sequence[int], waited_s: float, rejected: Sequence[str]
) -> RendezvousError:
    """Returns the error for ranks that did not join a rendezvous.

    Args:
        spec: The cluster.
        missing: The ranks that did not join.
        unresponsive: The ranks that joined, but no longer answer.
        waited_s: The seconds that rank 0 has waited.
        rejected: Other programs that connected to rank 0's port, and what they sent.

    Returns:
        The error for all ranks.
    """
    parts = []
    if missing:
        parts.append(f"{name_ranks(spec, missing)} did not join")
    if unresponsive:
        parts.append(f"{name_ranks(spec, unresponsive)} joined, but no longer answered")
    what = f"Not all {spec.world_size} training processes joined the rendezvous within {waited_s:.1f} s"
    what += f": {'; '.join(parts)}."
    if rejected:
        what += f" Other programs connected to rank 0's port: {'; '.join(rejected)}."
    do = (
        f"Read the logs of these ranks: check that they were started, are not stopped, and that their machines can "
        f"connect to {spec.workers[0]}. If they need longer to start, raise `timeout_s`."
    )
    return RendezvousError(explain(what, do=do))


def name_ranks(spec: ClusterSpec, ranks: Sequence[int]) -> str:
    """Returns `rank 1 (host1:12345), rank 2 (host2:12345)`, shortened for many ranks."""
    named = ", ".join(f"rank {rank} ({spec.workers[rank]})" for rank in sorted(ranks)[:_MOST_NAMED])
    more = len(ranks) - _MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named
