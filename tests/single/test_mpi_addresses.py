"""The address of a process of `mpirun` for its peers, and the exchange of addresses."""

from __future__ import annotations

import pytest

from tfdistkit.cli.main import main
from tfdistkit.cluster import detect_cluster
from tfdistkit.cluster.environments.mpi_addresses import can_exchange, exchange_addresses, own_host
from tfdistkit.cluster.routes import addresses_of_interfaces
from tfdistkit.errors import ClusterConfigError

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
PMIX = {"PMIX_NAMESPACE": "35127297", "PMIX_RANK": "0"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}

LOOPBACK = next(name for name, ip in addresses_of_interfaces().items() if ip == "127.0.0.1")


def put(monkeypatch: pytest.MonkeyPatch, *groups: dict[str, str]) -> None:
    for group in groups:
        for name, value in group.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [((OPEN_MPI, PMIX), True), ((OPEN_MPI,), False), ((HYDRA, PMIX), False), ((PMIX,), False), ((), False)],
)
def test_when_addresses_can_be_exchanged(
    monkeypatch: pytest.MonkeyPatch, groups: tuple[dict[str, str], ...], expected: bool
) -> None:
    put(monkeypatch, *groups)
    cluster = detect_cluster()
    assert can_exchange(cluster) == expected
    if not expected:
        assert exchange_addresses(cluster, 1) is cluster


def test_env_names_the_exchange_of_addresses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, OPEN_MPI, PMIX)
    assert main(["env"]) == 0
    assert "the strategy 'multiworker' exchanges them through PMIx" in capsys.readouterr().out


@pytest.mark.parametrize("wanted", [LOOPBACK, f"no-such-one,{LOOPBACK}", "127.0.0.0/8", "203.0.113.0/24,127.0.0.0/8"])
@pytest.mark.parametrize("variable", ["OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include"])
def test_the_interface_of_open_mpi(monkeypatch: pytest.MonkeyPatch, variable: str, wanted: str) -> None:
    monkeypatch.setenv(variable, wanted)
    assert own_host() == "127.0.0.1"


@pytest.mark.parametrize("wanted", ["no-such-one", "203.0.113.0/24", ",/"])
def test_an_unknown_interface(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", wanted)
    with pytest.raises(ClusterConfigError, match=rf"(?s)btl_tcp_if_include={wanted}.*{LOOPBACK} \(127.0.0.1\)"):
        own_host()


def test_towards_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [ip for ip in addresses_of_interfaces().values() if not ip.startswith("127.")]
    for ip in others:
        monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", f"35127296.0;tcp://{ip}:40229;tcp6://[::1]:40375")
        assert own_host() == ip
    # mpirun on this machine only, or another implementation.
    for told in ("35127296.0;tcp://127.0.0.1:40229", "nothing that we know"):
        monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", told)
        assert own_host() not in ("127.0.0.1", "")
