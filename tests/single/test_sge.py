"""The host list of a parallel job of Grid Engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdistkit.cluster import ClusterSpec, detect_cluster
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.cluster.environments.sge import read_pe_hostfile
from tfdistkit.errors import ClusterConfigError

# host, slots, queue, processors: https://gridscheduler.sourceforge.net/htmlman/htmlman5/sge_pe.html, $pe_hostfile
REAL = """\
node12.cluster 8 gpu.q@node12.cluster UNDEFINED
node2.cluster 4 gpu.q@node2.cluster <NULL>
node12.cluster 2 short.q@node12.cluster 0,0:0,1
"""


def read(monkeypatch: pytest.MonkeyPatch, path: Path) -> tuple[HostSlots, ...] | None:
    monkeypatch.setenv("PE_HOSTFILE", str(path))
    return read_pe_hostfile()


def test_hosts_in_the_order_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(REAL)
    assert read(monkeypatch, tmp_path / "hosts") == (HostSlots("node12.cluster", 10), HostSlots("node2.cluster", 4))
    assert detect_cluster() == ClusterSpec(), "what is listed is not started yet"


def test_two_columns_are_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("\na 1\n\nb 2\n")
    assert read(monkeypatch, tmp_path / "hosts") == (HostSlots("a", 1), HostSlots("b", 2))


def test_no_job() -> None:
    assert read_pe_hostfile() is None


@pytest.mark.parametrize("text", ["", "\n\n", "node1\n", "node1 many all.q\n", "node1 0 all.q\n", "a 1\nnode1 -1 q\n",
                                  "node1 " + "9" * 5000])  # fmt: skip
def test_an_invalid_host_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(
        ClusterConfigError, match="must name a host list of Grid Engine. Received: (line [12]: 'node1|no lines)"
    ):
        read(monkeypatch, tmp_path / "hosts")


def test_a_missing_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        ClusterConfigError, match=f"`PE_HOSTFILE` must name a readable file.*PE_HOSTFILE={tmp_path}/none"
    ):
        read(monkeypatch, tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterConfigError, match="must name a readable file"):
        read(monkeypatch, tmp_path / "binary")
