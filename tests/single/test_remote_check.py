"""Which differences between hosts are problems, and what the table shows: pure, on made-up hosts."""

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
# Where another host gets the same from: no index has it.
CLONE = f"in a clone of tfdistkit {__version__} on that host, /py -m pip install ."


def looks(*changes: dict[str, Any]) -> list[HostReport]:
    hosts = [HostReport(f"node{number}", connection=None) for number in range(len(changes))]  # type: ignore[arg-type]
    for host, change in zip(hosts, changes, strict=True):
        host.found = {**GOOD, **change}
        host.seconds = 0.31
    return hosts


def problems(hosts: list[HostReport]) -> dict[str, list[str]]:
    return {host.host: [str(problem) for problem in host.problems] for host in hosts if host.problems}


def test_what_is_the_same_is_fine() -> None:
    hosts = looks({}, {"python": "3.12.9"}, {"executable": "/other/py"})
    compare(hosts, "abc", needs_horovod=False)
    assert problems(hosts) == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"python": "3.11.4"}, "Python is 3.11.4, and on the others it is 3.12. Name the same Python for all: --"),
        ({"tensorflow": "2.20.0"}, "TensorFlow is 2.20.0, and on the others it is 2.21.0. Install the same every"),
        ({"keras": None}, "Keras is not there, and on the others it is 3.15.1."),
        (
            {"tfdistkit": None, "why": "No module"},
            f"tfdistkit cannot be imported there (No module). Install it: {CLONE}",
        ),
        ({"tfdistkit": "0.0.9"}, f"It has tfdistkit 0.0.9, and here it is {__version__}. Install the same: {CLONE}"),
        ({"script": "abd"}, "Its script is another one than here. Copy it to the same place on the host"),
        ({"script": None, "why_script": "Permission denied"}, "The script is not there (Permission denied). Copy it"),
        ({"script": None}, "The module is not there. Copy it"),
    ],
)
def test_what_differs_is_a_problem_of_that_host(change: dict[str, Any], told: str) -> None:
    hosts = looks({}, change, {})
    compare(hosts, "abc", needs_horovod=False)
    (found,) = problems(hosts)["node1"]
    assert found.startswith(told) and list(problems(hosts)) == ["node1"]


def test_horovod_counts_where_it_is_needed() -> None:
    hosts = looks({}, {"horovod": "0.28.1"})
    compare(hosts, None, needs_horovod=True)
    assert problems(hosts)["node0"] == [
        "Horovod is not installed there. Build it there: /py -m tfdistkit horovod install"
    ]


def test_a_script_that_is_not_here_is_compared_with_nothing() -> None:
    hosts = looks({"script": "module"}, {"script": "module"})
    compare(hosts, None, needs_horovod=False)
    assert problems(hosts) == {}


def test_of_two_that_differ_the_first_one_is_right() -> None:
    assert most_common(["a", "b"]) == "a" and most_common(["a", "b", "b"]) == "b" and most_common([]) is None


def test_the_table_has_a_line_for_each_host() -> None:
    hosts = looks({}, {"script": None})
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


def test_the_error_tells_all_of_it() -> None:
    error = HostsNotReady("host  answers\na     no", {"a": [Problem("It is off.", "Look."), Problem("x.", "")]}, 3)
    assert str(error).splitlines() == [
        "1 of 3 hosts cannot take part, so nothing was started: a.",
        "host  answers",
        "a     no",
        "a: It is off. Look.",
        "a: x.",
    ]
