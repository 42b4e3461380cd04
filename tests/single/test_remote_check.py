"""The preflight report: which differences between hosts are problems, and the table. Without hosts."""

from __future__ import annotations

from typing import Any

import pytest

from tfdistkit import __version__
from tfdistkit.launcher.ssh.preflight_report import HostReport, compare, describe
from tfdistkit.launcher.ssh.problems import HostsNotReady, Problem, most_common

GOOD = {
    "python": "3.12.4",
    "executable": "/py",
    "tfdistkit": __version__,
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "horovod": None,
    "script": "abc",
}
# The install command for another host: no package index has tfdistkit.
CLONE = f"in a clone of tfdistkit {__version__} on that host, /py -m pip install ."


def reports(*changes: dict[str, Any]) -> list[HostReport]:
    hosts = [HostReport(f"node{number}", connection=None) for number in range(len(changes))]  # type: ignore[arg-type]
    for host, change in zip(hosts, changes, strict=True):
        host.found = {**GOOD, **change}
        host.seconds = 0.31
    return hosts


def problems(hosts: list[HostReport]) -> dict[str, list[str]]:
    return {host.host: [str(problem) for problem in host.problems] for host in hosts if host.problems}


def test_equal_hosts_have_no_problems() -> None:
    hosts = reports({}, {"python": "3.12.9"}, {"executable": "/other/py"})
    compare(hosts, "abc", needs_horovod=False)
    assert problems(hosts) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": "3.11.4"}, "Python is 3.11.4, and on the other hosts it is 3.12. Name the same Python for all"),
        ({"tensorflow": "2.20.0"}, "TensorFlow is 2.20.0, and on the other hosts it is 2.21.0. Install the same"),
        ({"keras": None}, "Keras is missing, and on the other hosts it is 3.15.1."),
        (
            {"tfdistkit": None, "why": "No module"},
            f"tfdistkit cannot be imported on it (No module). Install it: {CLONE}",
        ),
        (
            {"tfdistkit": "0.0.9"},
            f"It has tfdistkit 0.0.9, and this machine has {__version__}. Install the same version: {CLONE}",
        ),
        ({"script": "abd"}, "Its script differs from that on this machine. Copy it to the same path on the host"),
        ({"script": None, "why_script": "Permission denied"}, "It cannot read the script (Permission denied). Copy it"),
        ({"script": None}, "It does not have the module. Copy it"),
    ],
)
def test_a_difference_is_a_problem_of_that_host(change: dict[str, Any], message: str) -> None:
    hosts = reports({}, change, {})
    compare(hosts, "abc", needs_horovod=False)
    (found,) = problems(hosts)["node1"]
    assert found.startswith(message) and list(problems(hosts)) == ["node1"]


def test_missing_horovod_is_a_problem_if_required() -> None:
    hosts = reports({}, {"horovod": "0.28.1"})
    compare(hosts, None, needs_horovod=True)
    assert problems(hosts)["node0"] == [
        "Horovod is not installed on it. Build it on the host: /py -m tfdistkit horovod install"
    ]


def test_a_script_that_the_launcher_lacks_is_not_compared() -> None:
    hosts = reports({"script": "module"}, {"script": "module"})
    compare(hosts, None, needs_horovod=False)
    assert problems(hosts) == {}


def test_the_most_common_value_wins_then_the_first() -> None:
    assert most_common(["a", "b"]) == "a" and most_common(["a", "b", "b"]) == "b" and most_common([]) is None


def test_the_report_has_one_line_per_host() -> None:
    hosts = reports({}, {"script": None})
    hosts[0].address, hosts[0].interface, hosts[0].ports, hosts[0].reaches = "10.0.0.1", "eth0", [1, 2], True
    silent = HostReport("node2", connection=None)  # type: ignore[arg-type]
    rows = [line.split() for line in describe([*hosts, silent]).splitlines()]
    assert rows[1] == [
        "node0",
        "0.3",
        "s",
        "3.12.4",
        __version__,
        "2.21.0",
        "3.15.1",
        "there",
        "eth0",
        "10.0.0.1",
        "2",
        "free",
        "reached",
    ]
    assert rows[2][-4:] == ["no", "-", "-", "-"] and rows[3] == ["node2", "no", *["-"] * 8]


def test_the_error_contains_the_report_and_all_problems() -> None:
    error = HostsNotReady("host  answers\na     no", {"a": [Problem("It is off.", "Look."), Problem("x.", "")]}, 3)
    assert str(error).splitlines() == [
        "1 of 3 hosts are not ready, so nothing was started: a.",
        "host  answers",
        "a     no",
        "a: It is off. Look.",
        "a: x.",
    ]
