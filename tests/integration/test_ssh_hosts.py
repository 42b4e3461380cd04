"""The hosts that the tests of ssh run on: apart from each other, reached by ssh, killed as a whole."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from net_hosts import NetHosts
from ssh_jobs import wait_until


@pytest.fixture(autouse=True)
def clean(hosts: NetHosts) -> Iterator[None]:
    hosts.clean()
    yield
    hosts.clean()


def test_hosts_are_apart_and_talk_by_ssh(hosts: NetHosts) -> None:
    hosts.write("only-1", "x", 1)
    seen = hosts.login("ssh", "h1", f"hostname; ls {hosts.work}; ssh h2 hostname; ssh h2 ls {hosts.work}")
    assert seen.stdout.split() == ["h1", "only-1", "h2"]
    assert hosts.login("hostname").stdout == "h0\n"


def test_a_host_that_is_killed_is_gone_and_comes_back(hosts: NetHosts) -> None:
    hosts.login("ssh", "h2", "sleep 600 >/dev/null 2>&1 & exit")
    # What served the connection may end a moment after it.
    wait_until(lambda: len(hosts.pids(2)) == 1, "the end of the session, with `sleep` left of it")
    hosts.kill(2)
    assert hosts.pids(2) == []
    assert hosts.login("ssh", "-o", "ConnectTimeout=1", "h2", "true", check=False).returncode == 255
    hosts.start(2)
    assert hosts.login("ssh", "h2", "true").returncode == 0
    hosts.signal_server(2, signal.SIGSTOP)
    started = time.monotonic()
    assert hosts.login("ssh", "-o", "ConnectTimeout=1", "h2", "true", check=False).returncode == 255
    assert time.monotonic() - started >= 0.9, "it takes connections, and never answers"
    hosts.signal_server(2, signal.SIGCONT)
    hosts.pull_cable(2)
    assert hosts.login("ssh", "-o", "ConnectTimeout=1", "h2", "true", check=False).returncode == 255
    hosts.plug_cable(2)
    assert hosts.login("ssh", "h2", "true").returncode == 0
