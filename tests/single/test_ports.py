"""Free ports, and the checks of this process's own address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tfdistkit import env
from tfdistkit.cluster import ClusterSpec, TaskSpec, check_own_address, free_ports, is_free, port_locks, ports
from tfdistkit.errors import ClusterConfigError, OptionError

# Documentation addresses (RFC 5737): no machine has them.
ELSEWHERE = "192.0.2.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def spec_at(host: str, port: int) -> ClusterSpec:
    return ClusterSpec({"worker": (f"{host}:{port}", "other:1")}, TaskSpec("worker", 0), source="TF_CONFIG")


def test_ports_are_distinct_and_free() -> None:
    found = free_ports(50)
    assert len(set(found)) == 50
    for port in found:
        with closing(socket.create_server(("", port))):
            pass


CHOOSE = """
import sys
from tfdistkit.cluster import free_ports
print(*free_ports(200), flush=True)
sys.stdin.read()
"""


def test_processes_that_choose_at_the_same_time_get_different_ports() -> None:
    """Many jobs start together; none listens yet."""
    command = [sys.executable, "-c", CHOOSE]
    choosing = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(12)]
    try:
        chosen = [port for one in choosing if one.stdout is not None for port in one.stdout.readline().split()]
        assert len(chosen) == len(set(chosen)) == 12 * 200
    finally:
        for one in choosing:
            one.communicate(timeout=60)
    # They are free again, however the processes ended.
    assert all(port_locks.lock(int(port)) for port in chosen[:20])
    for port in chosen[:20]:
        port_locks.unlock(int(port))


def test_locks_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_locks, "_PATH", "/proc/no/such/file")
    monkeypatch.setattr(port_locks, "_is_open", False)
    monkeypatch.setattr(port_locks, "_file", None)
    assert len(set(free_ports(3))) == 3


def test_ports_lie_outside_the_range_of_outgoing_connections() -> None:
    low, high = ports._ephemeral_range()
    assert not [port for port in free_ports(20) if low <= port <= high]


def test_no_ports() -> None:
    assert free_ports(0) == []
    with pytest.raises(OptionError, match="count=-1"):
        free_ports(-1)


def test_a_taken_port_is_never_returned(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    others = free_ports(2)
    monkeypatch.setattr(ports, "_candidates", lambda: [taken, *others])
    assert free_ports(2) == others
    monkeypatch.setattr(ports, "_candidates", lambda: [taken])
    with pytest.raises(ClusterConfigError, match="too few free ports"):
        free_ports(1)


def test_seeding_random_does_not_decide_the_ports() -> None:
    import random

    random.seed(0)
    first = free_ports(3)
    random.seed(0)
    assert first != free_ports(3)


def test_is_free(taken: int) -> None:
    assert not is_free("127.0.0.1", taken)
    assert not is_free("localhost", taken)
    assert not is_free("", taken), "a server on all interfaces would collide with one on the loopback"
    assert is_free("127.0.0.1", free_ports(1)[0])
    assert not is_free(ELSEWHERE, free_ports(1)[0])


def test_a_port_with_recent_connections_is_free() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    accepted.close()  # this end closes first: its TIME_WAIT holds the port
    assert client.recv(1) == b""
    client.close()
    server.close()
    assert is_free("", port)


def test_holder_names_the_process(taken: int) -> None:
    assert f"(pid {os.getpid()})" in ports.holder(taken)
    assert ports.holder(free_ports(1)[0]) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", socket.gethostname()])
def test_own_address_is_here(host: str) -> None:
    check_own_address(spec_at(host, free_ports(1)[0]))


def test_own_address_in_ipv6() -> None:
    if not ports.has_ipv6():
        assert not is_free("::1", free_ports(1)[0])
        return
    check_own_address(spec_at("[::1]", free_ports(1)[0]))


def test_own_port_is_taken(taken: int) -> None:
    with pytest.raises(ClusterConfigError, match=rf"Port {taken} .* by .*\(pid {os.getpid()}\)") as caught:
        check_own_address(spec_at("127.0.0.1", taken))
    assert f"worker 0 at '127.0.0.1:{taken}' in TF_CONFIG" in str(caught.value)


def test_own_address_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KUBERNETES, raising=False)
    with pytest.raises(ClusterConfigError, match="not on this machine"):
        check_own_address(spec_at(ELSEWHERE, free_ports(1)[0]))


def test_own_host_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KUBERNETES, raising=False)
    with pytest.raises(ClusterConfigError, match="does not resolve"):
        check_own_address(spec_at("no-such-host.invalid", free_ports(1)[0]))


@pytest.mark.parametrize(("name", "value"), [(env.KUBERNETES, "10.96.0.1"), (env.CHECK_ADDRESS, "0")])
def test_behind_address_translation_only_the_port_is_checked(
    monkeypatch: pytest.MonkeyPatch, taken: int, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    check_own_address(spec_at("no-such-host.invalid", free_ports(1)[0]))
    with pytest.raises(ClusterConfigError, match=f"Port {taken}"):
        check_own_address(spec_at(ELSEWHERE, taken))


def test_a_single_process_has_no_address_to_check() -> None:
    check_own_address(ClusterSpec())
