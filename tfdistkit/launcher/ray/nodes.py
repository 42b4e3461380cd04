"""The nodes that Ray chose: the preflight check of each, and the placement of the processes on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfdistkit.launcher.placement import HERE, Place
from tfdistkit.launcher.ray.cluster import RaySpec
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.launcher.ssh.connection import Connection
from tfdistkit.launcher.ssh.connection_pool import ConnectionPool
from tfdistkit.launcher.ssh.preflight import Preflight, own_checksum, places_of, require_ready, wanted_of
from tfdistkit.launcher.ssh.preflight_report import HostReport, compare, describe
from tfdistkit.launcher.ssh.problems import HostsNotReady


@dataclass(frozen=True)
class CheckedNodes:
    """The result of a successful preflight check.

    Args:
        places: The placement of each process, in order.
        pythons: The Python of each process: that of its Ray node.
        table: The preflight report, one line per node.
    """

    places: tuple[Place, ...]
    pythons: tuple[str, ...]
    table: str


def ranks_by_node(addresses: Sequence[str], roles: Sequence[str]) -> list[int]:
    """Returns the actor of each process: workers on the same node get neighbouring ranks.

    Args:
        addresses: The address of the node of each actor.
        roles: The role of each actor, which it keeps: it has the resources for it.
    """
    order = list(range(len(roles)))
    workers = [index for index in order if roles[index] == "worker"]
    nodes = list(dict.fromkeys(addresses))
    for place, index in zip(workers, sorted(workers, key=lambda one: nodes.index(addresses[one])), strict=True):
        order[place] = index
    return order


def check_nodes(
    pool: ConnectionPool,
    connections: Sequence[Connection],
    addresses: Sequence[str],
    job: JobSpec,
    should_stop: Callable[[], bool],
    nodes: Sequence[str],
) -> CheckedNodes:
    """Runs the preflight check of the nodes, by the first agent on each.

    Args:
        pool: Serves the connections.
        connections: The connection to the agent of each process.
        addresses: The address of the node of each process.
        job: The job.
        should_stop: Whether to abort the check.
        nodes: The name of the Ray node of each process.

    Raises:
        HostsNotReady: if a node fails the check; the message holds the report and the fixes, and its problems are by
            the name of the node.
    """
    cluster = job.hosts
    assert isinstance(cluster, RaySpec)
    first = {address: one for address, one in reversed(list(zip(addresses, connections, strict=True)))}
    names = _names(addresses, connections)
    reports = {address: HostReport(names[address], first[address]) for address in dict.fromkeys(addresses)}
    listed = list(reports.values())
    preflight = _NodePreflight(pool, cluster, listed, should_stop)
    preflight.addresses = {one.host: address for address, one in reports.items()}
    preflight.describe_hosts()
    preflight.choose_addresses()
    preflight.inspect_environment(wanted_of(job), job.env, [list(addresses).count(one) for one in reports])
    compare(listed, own_checksum(job), needs_horovod=False)
    preflight.connect_all()
    table = describe(listed)
    try:
        require_ready(listed, table)
    except HostsNotReady as failed:
        by_node = {node: names[address] for node, address in zip(nodes, addresses, strict=True)}
        failed.problems = {node: failed.problems[name] for node, name in by_node.items() if name in failed.problems}
        raise
    places = places_of([names[address] for address in addresses], listed)
    # Workers have the threads for the CPUs that they reserved, not for all of the node.
    sized = tuple(replace(one, cores=cluster.threads * list(addresses).count(at)) for one, at in zip(places, addresses))
    return CheckedNodes(sized, tuple(reports[at].facts["executable"] for at in addresses), table)


class _NodePreflight(Preflight):
    """The preflight check of nodes whose addresses Ray knows."""

    addresses: dict[str, str]

    def _default_address(self, report: HostReport, others: Sequence[HostReport]) -> str | None:
        return self.addresses[report.host] if len(self.addresses) > 1 else HERE


def _names(addresses: Sequence[str], connections: Sequence[Connection]) -> dict[str, str]:
    """Returns a name for each node: its host name, with its address where two nodes have the same name."""
    hosts = {address: one.host for address, one in zip(addresses, connections, strict=True)}
    listed = list(hosts.values())
    return {at: host if listed.count(host) == 1 else f"{host} ({at})" for at, host in hosts.items()}
