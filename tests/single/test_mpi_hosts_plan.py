"""The options of mpirun for several hosts, and the script that it calls instead of ssh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tfdistkit.cli.run.options import parse
from tfdistkit.cluster.routes import addresses_of_interfaces
from tfdistkit.errors import OptionError
from tfdistkit.launcher import JobSpec
from tfdistkit.launcher.hosts import HostsSpec, parse_hosts
from tfdistkit.launcher.mpi.hosts import agent_script, interface_options, mpi_ranks, rank_hosts


def job(hosts: str, world_size: int, ps: int = 0) -> JobSpec:
    spec = HostsSpec(parse_hosts(hosts), "python3", "/here")
    return JobSpec(world_size, ("train.py",), Path("/logs"), backend="mpi", hosts=spec, ps=ps)


@pytest.mark.parametrize(
    ("hosts", "world_size", "ps", "expected", "ranks"),
    [
        ("h1:2,h2:2", 4, 0, "h1:2,h2:2", [0, 1, 2, 3]),
        ("h1:2,h2:2", 3, 0, "h1:2,h2:1", [0, 1, 2]),
        ("h1:2,h2:2", 2, 0, "h1:2", [0, 1]),
        ("me@h1:1,h2:1", 2, 0, "h1:1,h2:1", [0, 1]),
        # Coordinator and workers, then servers: 0 and 1 are on h1, 2 on h2; 3 on h1, 4 on h2.
        ("h1:1,h2:1", 2, 2, "h1:3,h2:2", [0, 1, 3, 2, 4]),
        ("h1:2,h2:1", 2, 1, "h1:4", [0, 1, 2, 3]),
    ],
)
def test_hosts_get_one_slot_per_rank(hosts: str, world_size: int, ps: int, expected: str, ranks: list[int]) -> None:
    spec = job(hosts, world_size, ps)
    assert spec.hosts is not None
    assert (rank_hosts(spec, spec.hosts), mpi_ranks(spec)) == (expected, ranks)


def test_mpirun_uses_the_ssh_options_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that mpirun calls instead of ssh, with a fake ssh that prints its arguments."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    key = tmp_path / "a key"
    key.touch()
    hosts = HostsSpec(parse_hosts("me@h1,h2"), "python3", "/here", ssh_port=2222, ssh_identity_file=str(key))
    script = tmp_path / "agent"
    script.write_text(agent_script(hosts))
    for host, name in (("h1", "me@h1"), ("h2", "h2")):
        said = subprocess.run(
            ["sh", str(script), host, "orted", "-mca 'x y'", "$HOME"], capture_output=True, text=True, timeout=30
        ).stdout
        assert said.startswith("<-oBatchMode=yes>") and f"<-p2222><-i><{key}>" in said
        assert said.endswith(f"<--><{name}><orted><-mca 'x y'><$HOME>")
    ended = subprocess.run(["sh", str(script), "h3", "orted"], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and "h3, which is not one of the hosts" in ended.stderr


def test_options_for_interfaces() -> None:
    here = next(iter(addresses_of_interfaces()))
    assert interface_options(None) == []
    assert interface_options("ib7") == ["--mca", "btl_tcp_if_include", "ib7"]
    assert interface_options(here)[-3:] == ["--mca", "oob_tcp_if_include", here]


def test_options_for_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    words = ["--backend", "mpi", "-H", "h1:1,h2:1", "--mpi-args=--mca btl 'tcp,self' -v", "train.py"]
    found = parse(words)
    assert found.mpi_args == ("--mca", "btl", "tcp,self", "-v") and found.hosts is not None and found.np == 2
    with pytest.raises(OptionError, match="must be used with the backend 'mpi'"):
        JobSpec(2, ("train.py",), tmp_path, mpi_args=("-v",))
    with pytest.raises(SystemExit):
        parse(["--backend", "mpi", "-np", "2", "--mpi-args='", "train.py"])
    assert "No closing quotation" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--backend", "slurm", "-np", "2", "-H", "h1:2", "train.py"])
    assert "SLURM chooses the hosts." in capsys.readouterr().err
