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
from tfdistkit.doctor.estimates import estimate
from tfdistkit.doctor.findings import Finding, Level, as_json, as_text
from tfdistkit.doctor.machine import check_network, check_programs, check_versions
from tfdistkit.doctor.network import check_hosts
from tfdistkit.doctor.own_links import measure_here
from tfdistkit.doctor.trials import ON_HOSTS, TRIALS, try_strategies
from tfdistkit.horovod_build.checking import INSTALL
from tfdistkit.launcher.hosts import HostsSpec

# What --links takes for the model.
_PARAMETERS, _STEP_MS = 25_000_000, 100.0
_MOST_PARAMETERS, _LONGEST_STEP_MS = 1e15, 1e9

_DESCRIPTION = """\
Checks versions, devices, network and programs on this machine, and tries the strategies, each in separate processes:
an all-reduce, and a training step whose result is known. With -H or --hostfile, checks those hosts and the links
between them, and tries the strategies there, with one process on each host. With --links, only measures the links
between the hosts, or within this machine, and tells what each compression and algorithm would reach on them."""

_EPILOG = """\
examples:
  tfdistkit doctor
  tfdistkit doctor --strategy multiworker
  tfdistkit doctor -H node1,node2 --no-trials
  tfdistkit doctor -H node1,node2 --links --parameters 110000000 --step-ms 250

exit codes:
  0 all checks passed: of the strategies that --strategy names (default: all installed ones), and of the hosts
  1 a check failed; 2 wrong usage"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit doctor`.

    Returns:
        The exit code, see `tfdistkit doctor --help`.
    """
    parser = make_parser()
    options = parser.parse_args(list(arguments))
    given = host_options.read(options, parser.error)
    if not options.links and (options.parameters, options.step_ms) != (None, None):
        parser.error("--parameters and --step-ms need --links")
    findings = _estimate(options, given) if options.links else _examine(options, _one_slot_each(given))
    is_well = all(finding.level is not Level.PROBLEM for finding in findings)
    if options.json:
        print(json.dumps({"ok": is_well, "findings": as_json(findings)}, indent=2))
    else:
        print(as_text(findings))
    return 0 if is_well else 1


def _estimate(options: argparse.Namespace, hosts: HostsSpec | None) -> list[Finding]:
    """Measures links, and tells what the ways to send would reach on them; loads no TensorFlow."""
    workers = 2 if hosts is None else sum(one.slots for one in hosts.slots)
    alone = _one_slot_each(hosts)
    findings, links = measure_here() if alone is None else check_hosts(alone, dict(options.passed))
    if alone is not None and len(alone.slots) == 1:
        do = "Name several hosts, or none for this machine."
        return [*findings, Finding("links", "all", Level.NOTE, "one host has no links to others", do)]
    return findings + estimate(options.parameters or _PARAMETERS, workers, (options.step_ms or _STEP_MS) / 1e3, links)


def _examine(options: argparse.Namespace, hosts: HostsSpec | None) -> list[Finding]:
    """Runs all checks and trials; only the checks of hosts run in parallel to others."""
    variables = dict(options.passed)
    with ThreadPoolExecutor(max_workers=1) as executor:
        on_hosts = executor.submit(check_hosts, hosts, variables) if hosts is not None else None
        findings, facts = check_versions()
        findings += check_network() + check_programs()
        if on_hosts is not None:
            findings += on_hosts.result()[0]
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
    tried.add_argument(
        "--links", action="store_true", help="only measure links: what each compression and algorithm would reach"
    )
    parser.add_argument(
        "--parameters",
        type=_count,
        metavar="N",
        help=f"the number of weights of the model, for --links (default: {_PARAMETERS})",
    )
    parser.add_argument(
        "--step-ms",
        type=_milliseconds,
        metavar="MS",
        help=f"how long a step computes, in milliseconds, for --links (default: {_STEP_MS:g})",
    )
    host_options.add_to(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    """Reads a number of weights; `25e6` is one, too."""
    try:
        count = float(text)
    except ValueError:
        count = 0.0
    if not (1 <= count <= _MOST_PARAMETERS and count == int(count)):
        raise argparse.ArgumentTypeError(f"expected a number of weights, such as 25000000, received {text!r}")
    return int(count)


def _milliseconds(text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds <= _LONGEST_STEP_MS:
        raise argparse.ArgumentTypeError(f"expected milliseconds, such as 100, received {text!r}")
    return milliseconds
