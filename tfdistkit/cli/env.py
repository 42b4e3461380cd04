"""Implements `tfdistkit env`: shows the cluster of this process, and the variables that it is read from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdistkit import env
from tfdistkit.cli.parser import USAGE_EXIT_CODE, Parser
from tfdistkit.cluster.detection import Finding, detect_cluster, run_all_readers
from tfdistkit.cluster.environments import slurm
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.cluster.environments.mpi_addresses import can_exchange
from tfdistkit.cluster.environments.registry import environments
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError

_DESCRIPTION = """\
Shows the cluster that a script would detect here: the variables of launchers that are set, the ones in use, and the
rank of this process. Start it like the script: `srun -N2 tfdistkit env`, `mpirun -np 2 tfdistkit env`."""

_EPILOG = """\
exit codes:
  0 the variables describe a cluster or a single process; 2 they are invalid, or contradict each other"""

# Most processes listed without --json.
_MOST_ROWS = 32
# Longer values are shortened without --json (characters).
_LONGEST_VALUE = 100


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit env`.

    Returns:
        The exit code, see `tfdistkit env --help`.
    """
    options = make_parser().parse_args(list(arguments))
    findings = run_all_readers()
    cluster, error = None, None
    try:
        cluster = detect_cluster()
    except ClusterConfigError as caught:
        error = caught
    if options.json:
        print(json.dumps(_as_json(findings, cluster, error), indent=2))
    else:
        print("\n".join([*_finding_rows(findings), *_cluster_rows(cluster)]))
    if error is not None:
        # Flushed first: a file that takes both streams must have the findings before the error.
        sys.stdout.flush()
        print(f"tfdistkit env: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    return 0


def make_parser() -> Parser:
    """Makes the parser of the command."""
    parser = Parser(
        prog="tfdistkit env",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _finding_rows(findings: Sequence[Finding]) -> list[str]:
    rows = ["found, in order of priority:"]
    for finding in findings:
        rows.append(f"  {finding.reader:<11} {_summary(finding)}")
        rows += [f"    {name}={_short(value)}" for name, value in finding.variables.items()]
    rows += [f"  {name:<11} {text}" for name, text in _notes().items()]
    only = env.text(env.CLUSTER)
    return rows if only is None else [*rows, f"  {env.CLUSTER}={only}: all other sources are ignored"]


def _summary(finding: Finding) -> str:
    if finding.error is not None:
        return f"invalid: {str(finding.error).splitlines()[0]}"
    return "-" if finding.cluster is None else _task_text(finding.cluster)


def _task_text(cluster: ClusterSpec) -> str:
    if cluster.has_servers or not cluster.is_training:
        return f"{cluster.task.role} {cluster.task.index}, world size {cluster.world_size}"
    return f"rank {cluster.rank} of {cluster.world_size}"


def _notes() -> dict[str, str]:
    """Returns notes on jobs of schedulers in which no cluster was started."""
    notes = {}
    job = slurm.in_job_without_step()
    if job is not None:
        notes["SLURM job"] = f"{job}, outside of its steps: a single process. Start several with `srun`."
    for one in environments():
        if one.hosts is None:
            continue
        job = f"{one.name.upper()} job"
        try:
            hosts = one.hosts()
        except ClusterConfigError as error:
            notes[job] = f"invalid: {error}"
        else:
            if hosts is not None:
                notes[job] = f"{_slots(hosts)}: a single process. Start several with `tfdistkit run`."
    return notes


def _slots(hosts: Sequence[HostSlots]) -> str:
    return ", ".join(f"{one.host}:{one.slots}" for one in hosts)


def _cluster_rows(cluster: ClusterSpec | None) -> list[str]:
    if cluster is None:
        return []
    rank = str(cluster.rank) if cluster.is_training else f"none, as a {cluster.task.role} does not train"
    rows = [
        "",
        f"cluster from  {cluster.source}",
        f"task          {cluster.task.role} {cluster.task.index}",
        f"rank          {rank}",
        f"world size    {cluster.world_size}",
        f"local rank    {cluster.local_rank} of {cluster.local_world_size} on this host",
        f"chief         {'yes' if cluster.is_chief else 'no'}",
    ]
    return rows + _address_rows(cluster)


def _address_rows(cluster: ClusterSpec) -> list[str]:
    if can_exchange(cluster):
        return ["addresses     unknown: the strategy 'multiworker' exchanges them through PMIx"]
    if not cluster.has_addresses:
        return ["addresses     unknown: the strategy 'horovod' works, 'multiworker' does not"]
    tasks = [(role, index) for role, listed in cluster.addresses.items() for index in range(len(listed))]
    rows = []
    for role, index in tasks[:_MOST_ROWS]:
        own = "   this process" if (role, index) == (cluster.task.role, cluster.task.index) else ""
        rows.append(f"  {f'{role} {index}':<11} {cluster.addresses[role][index] or 'unknown'}{own}")
    more = len(tasks) - len(rows)
    return (["addresses"] if rows else []) + rows + ([f"  and {more} more: see --json"] if more else [])


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else value[:_LONGEST_VALUE] + "..."


def _as_json(
    findings: Sequence[Finding], cluster: ClusterSpec | None, error: ClusterConfigError | None
) -> Mapping[str, Any]:
    return {
        "readers": [
            {
                "name": finding.reader,
                "variables": dict(finding.variables),
                "cluster": _cluster_as_json(finding.cluster),
                "error": None if finding.error is None else str(finding.error),
            }
            for finding in findings
        ],
        "notes": _notes(),
        "choice": env.text(env.CLUSTER),
        "cluster": _cluster_as_json(cluster),
        "error": None if error is None else str(error),
    }


def _cluster_as_json(cluster: ClusterSpec | None) -> Mapping[str, Any] | None:
    if cluster is None:
        return None
    return {
        "source": cluster.source,
        "task": {"type": cluster.task.role, "index": cluster.task.index},
        "rank": cluster.rank if cluster.is_training else None,
        "world_size": cluster.world_size,
        "local_rank": cluster.local_rank,
        "local_world_size": cluster.local_world_size,
        "is_chief": cluster.is_chief,
        "addresses": {role: list(listed) for role, listed in cluster.addresses.items()}
        if cluster.has_addresses
        else None,
    }
