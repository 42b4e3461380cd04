"""`tfdistkit doctor` tries strategies for real, and measures real links."""

from __future__ import annotations

import json
import os
import sys

import pytest
from net_hosts import LOGIN, NetHosts
from ssh_jobs import PATHS, wait_until

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

# Several processes load TensorFlow, one after the other, on a busy machine.
DEADLINE_S = 400.0


def doctor(hosts: NetHosts, *words: str) -> tuple[int, dict, dict]:
    """Runs it on the login host; returns the exit code, the report, and its findings by topic and name."""
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = hosts.run(
        LOGIN,
        *(sys.executable, "-m", "tfdistkit", "doctor", "--json", *words),
        env={**os.environ, **quiet, "TMPDIR": str(hosts.temporary(LOGIN))},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert list(hosts.temporary(LOGIN).iterdir()) == []
    for number in (LOGIN, *hosts.numbers):
        wait_until(lambda number=number: hosts.pids(number) == [], f"the end of all that ran on h{number}")
    return done.returncode, report, {(one["topic"], one["name"]): one for one in report["findings"]}


def test_strategies_are_tried(hosts: NetHosts) -> None:
    """One that works, and one that cannot: this environment has no Horovod, unless it was installed."""
    code, report, found = doctor(hosts, "--strategy", "multiworker", "--strategy", "horovod")
    assert found["strategies", "multiworker"]["level"] == "ok", found["strategies", "multiworker"]
    assert "works: 2 processes" in found["strategies", "multiworker"]["text"]
    assert found["versions", "TensorFlow"]["level"] in ("ok", "warning")
    assert found["network", "own name"]["text"] == "h0, 10.77.0.254"
    assert found["devices", "CPU"]["text"] == f"{len(os.sched_getaffinity(0))} cores for this process"
    horovod = found["strategies", "horovod"]
    if found["versions", "Horovod"]["text"] == "not installed":
        assert horovod["level"] == "problem" and "tfdistkit horovod install" in horovod["do"]
    assert (code, report["ok"]) == ((0, True) if horovod["level"] == "ok" else (1, False))


def test_hosts_and_the_links_between_them(hosts: NetHosts) -> None:
    """h2 sends 100 Mbit/s at most."""
    path = ["-x", f"PYTHONPATH={PATHS}"]
    hosts.shape(2, "100mbit")
    try:
        code, report, found = doctor(hosts, "-H", "h1,h2,h0", "--no-trials", *path)
        estimated = doctor(hosts, "-H", "h1,h2", "--links", "--parameters", "1e6", *path)
    finally:
        hosts.shape(2, None)
    assert (code, report["ok"]) == (0, True), report
    assert found["hosts", "all"]["text"].count("reached") == 3
    slow, fast = found["links", "h2 -> h1"], found["links", "h0 -> h1"]
    assert slow["level"] == "warning" and "--network-interface" in slow["do"]
    assert 0.05 < float(slow["text"].split()[0]) < 0.12, "Gbit/s"
    assert float(fast["text"].split()[0]) > 2 * float(slow["text"].split()[0])
    assert ("strategies", "multiworker") not in found
    # With --links what each way to send would take over it: 4 MB at 100 Mbit/s take 320 ms.
    code, _, found = estimated
    assert code == 0 and {topic for topic, _ in found} == {"hosts", "links", "estimates"}
    assert 250 < float(found["estimates", "none"]["text"].split()[0]) < 700
    assert "PowerSGD(rank=4)" in found["estimates", "recommended"]["text"]


def test_hosts_that_are_not_ready(hosts: NetHosts) -> None:
    """Without the rest, which loads TensorFlow."""
    script = hosts.write(
        "look.py",
        f"""
        import json, os, sys
        from tfdistkit.doctor.findings import as_json
        from tfdistkit.doctor.network import check_hosts
        from tfdistkit.launcher.hosts import HostsSpec, parse_hosts
        spec = HostsSpec(parse_hosts("h1,nowhere.invalid"), sys.executable, os.getcwd())
        print(json.dumps(as_json(check_hosts(spec, {{"PYTHONPATH": {PATHS!r}}})[0])))
    """,
        LOGIN,
    )
    found = {one["name"]: one for one in json.loads(hosts.login(sys.executable, str(script)).stdout)}
    assert found["all"]["level"] == found["nowhere.invalid"]["level"] == "problem" and "h1" not in found
    assert "Could not resolve hostname" in found["nowhere.invalid"]["text"]
    assert found["nowhere.invalid"]["do"].startswith("Correct the name")
    assert found["all"]["text"].splitlines()[1].split()[:1] == ["h1"]
