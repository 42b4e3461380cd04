"""The doctor warns where others could reach the ports of jobs: in networks that the test makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tfdistkit.cli import doctor
from tfdistkit.doctor import Finding, Level

DEADLINE_S = 60
LOOK = """
    import json
    from tfdistkit.doctor.findings import as_json
    from tfdistkit.doctor.machine import check_network
    print(json.dumps([one for one in as_json(check_network()) if one["name"] == "exposure"]))
"""
CABLE = "ip link add v0 type veth peer name v1; ip link set v1 up; ip link set v0 up"


def has_no_networks() -> bool:
    command = ["unshare", "--net", "ip", "link"]
    if shutil.which("unshare") is None:
        return True
    return subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False).returncode != 0


# Where hosts must be tested, these tests run, and fail without networks.
pytestmark = pytest.mark.skipif(
    os.environ.get("TFDISTKIT_REQUIRE_HOSTS") != "1" and has_no_networks(),
    reason="what others reach is not tested: no network of its own can be made here (unshare --net)",
)


def look_in_network(*commands: str) -> dict[str, Any]:
    """What the doctor finds in a network with nothing but what the commands make."""
    setup = "; ".join(["set -e", *commands, 'exec "$@"'])
    command = ["unshare", "--net", "sh", "-c", setup, "sh", sys.executable, "-c", textwrap.dedent(LOOK)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    return dict(found)


def test_loopback_alone_is_not_exposed() -> None:
    found = look_in_network("ip link set lo up")
    assert (found["level"], found["do"]) == ("ok", "")
    assert found["text"] == "none: this machine has only loopback addresses"


@pytest.mark.parametrize("address", ["10.9.8.7", "2001:db8::7"])
def test_an_interface_is_exposed(address: str) -> None:
    size = 64 if ":" in address else 24
    found = look_in_network("ip link set lo up", CABLE, f"ip address add {address}/{size} dev v0")
    assert found["level"] == "warning"
    assert f"multiworker and parameter_server listen on v0 {address} without authentication" in found["text"]
    assert "tfdistkit run --isolate" in found["do"] and "firewall" in found["do"]


def test_where_there_is_no_isolation() -> None:
    forbidden = "echo 0 > /proc/sys/user/max_net_namespaces"
    setup = f"{CABLE}; ip address add 10.9.8.7/24 dev v0; {forbidden}"
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", f'set -e; {setup}; exec "$@"', "sh"]
    command += [sys.executable, "-c", textwrap.dedent(LOOK)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["level"] == "warning" and "--isolate" not in found["do"] and "firewall" in found["do"]


def test_a_warning_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    warning = Finding("network", "exposure", Level.WARNING, "others reach it", "Close it.")
    monkeypatch.setattr(doctor, "check_versions", lambda: ([], {"horovod": None}))
    monkeypatch.setattr(doctor, "check_network", lambda: [warning])
    assert doctor.main(["--no-trials"]) == 0
    assert "  exposure: Close it." in capsys.readouterr().out
