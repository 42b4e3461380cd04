"""Implements `tfdistkit doctor`: checks this machine and hosts, tries the strategies, and proposes fixes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tfdistkit.cli.parser import Parser
from tfdistkit.cli.run import host_options
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.doctor.findings import Finding, Level, as_json, as_text
from tfdistkit.doctor.machine import check_network, check_programs, check_versions
from tfdistkit.doctor.network import check_hosts
from tfdistkit.doctor.trials import ON_HOSTS, TRIALS, try_strategies
from tfdistkit.horovod_build.checking import INSTALL
from tfdistkit.launcher.hosts import HostsSpec

_DESCRIPTION = """\
Checks versions, devices, network and programs on this machine, and tries the strategies, each in separate processes:
an all-reduce, and a training step whose result is known. With -H or --hostfile, checks those hosts and the links
between them, and tries the strategies there, with one process on each host."""

_EPILOG = """\
examples:
  tfdistkit doctor
  tfdistkit doctor --strategy multiworker
  tfdistkit doctor -H node1,node2 --no-trials

exit codes:
  0 the requested strategies and hosts work, or all that are installed
  1 some do not work; 2 wrong usage"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit doctor`.

    Returns:
        The exit code, see `tfdistkit doctor --help`.
    """
    parser = make_parser()
    options = parser.parse_args(list(arguments))
    hosts = _one_slot_each(host_options.read(options, parser.error))
    findings = _examine(options, hosts)
    is_well = all(finding.level is not Level.PROBLEM for finding in findings)
    if options.json:
        print(json.dumps({"ok": is_well, "findings": as_json(findings)}, indent=2))
    else:
        print(as_text(findings))
    return 0 if is_well else 1


def _examine(options: argparse.Namespace, hosts: HostsSpec | None) -> list[Finding]:
    """Runs all checks and trials; only the checks of hosts run in parallel to others."""
    variables = dict(options.passed)
    with ThreadPoolExecutor(max_workers=1) as executor:
        on_hosts = executor.submit(check_hosts, hosts, variables) if hosts is not None else None
        findings, facts = check_versions()
        findings += check_network() + check_programs()
        if on_hosts is not None:
            findings += on_hosts.result()
    if options.no_trials or any(finding.topic == "hosts" and finding.level is Level.PROBLEM for finding in findings):
        return findings
    if "problem" in facts:
        return findings  # trials need TensorFlow
    names = options.strategies or [
        name for name in (TRIALS if hosts is None else ON_HOSTS) if name != "horovod" or facts["horovod"] is not None
    ]
    if facts["horovod"] is None and "horovod" in names:
        names = [name for name in names if name != "horovod"]
        findings.append(Finding("strategies", "horovod", Level.PROBLEM, "Horovod is not installed", INSTALL))
    if names and not options.json:
        print(f"Trying {', '.join(names)}: some seconds each.", file=sys.stderr, flush=True)
    return findings + try_strategies(names, hosts, variables)


def _one_slot_each(hosts: HostsSpec | None) -> HostsSpec | None:
    """Reduces each host to one slot: one process per host suffices to test the strategies."""
    if hosts is None:
        return None
    return replace(hosts, slots=tuple(HostSlots(one.host, 1) for one in hosts.slots))


def make_parser() -> Parser:
    """Makes the parser of the command."""
    parser = Parser(
        prog="tfdistkit doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tried = parser.add_mutually_exclusive_group()
    tried.add_argument(
        "--strategy",
        dest="strategies",
        action="append",
        choices=list(TRIALS),
        help="try this strategy; can be given several times (default: all that are installed)",
    )
    tried.add_argument("--no-trials", action="store_true", help="do not try strategies")
    host_options.add_to(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
