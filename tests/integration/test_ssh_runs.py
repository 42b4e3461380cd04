"""`tfdistkit run -H`: what workers on two hosts are told, what comes back of them, what is checked before."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_hosts import LOGIN, SSH_PORT, NetHosts
from patience import longer
from ssh_jobs import PATHS, Ended, command_line, run_on_hosts, ssh_job

from tfdistkit.cluster import from_tf_config

# Nothing of this may be read by any shell on the way.
ODD = ["it's", "$(touch shell-was-here)", "a b;c", "`id`", "new\nline", "ø\t!", "", "--", "-x", '"', "*", "\\", "%n"]
SECRET = "s3cret $(touch shell-was-here)' \" ;\n!"

TELL = """
    import json, os, pathlib, sys, time
    names = ("TF_CONFIG", "SECRET", "FROM_SHELL", "TFDISTKIT_RANK", "TFDISTKIT_LOCAL_RANK", "PWD", "TMPDIR")
    told = {name: os.environ.get(name) for name in names}
    print(json.dumps({"host": os.uname().nodename, "argv": sys.argv[1:], "cwd": os.getcwd(), **told}))
    print("to stderr", file=sys.stderr)
    sys.stdout.buffer.write(bytes(range(256)) * 4000)
    sys.stdout.flush()
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
"""


def told(stdout: str) -> dict[int, dict]:
    """What each rank printed about itself."""
    return {int(line[1]): json.loads(line[4:]) for line in stdout.splitlines() if re.match(r"\[\d\] \{", line)}


@pytest.fixture(autouse=True)
def clean(hosts: NetHosts) -> Iterator[None]:
    hosts.clean()
    yield
    hosts.clean()


def test_four_workers_on_two_hosts(hosts: NetHosts) -> None:
    script = str(hosts.write("train.py", TELL))
    hosts.write("hostfile", "# two hosts\nh1 slots=2\nh2 slots=2 max_slots=4\n", LOGIN)
    key = ["--ssh-port", str(SSH_PORT), "--ssh-identity-file", str(hosts.folder / "id")]
    words = ["--hostfile", "hostfile", *key, "-x", f"SECRET={SECRET}", "-x", "FROM_SHELL", "--log-dir", "logs"]
    with ssh_job(hosts, *words, script, *ODD, FROM_SHELL="1 & 2") as running:
        running.wait_for(*(f"[{rank}] {{" for rank in range(4)))
        lines = [command_line(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()]
        shown = [line for line in lines if "s3cret" in line and "tfdistkit run" not in line]
        assert any("ssh" in line and "BatchMode" in line for line in lines) and not shown
        for number in hosts.numbers:
            hosts.write("go", "", number)
        ended = running.end()
        running.nothing_is_left()
        kept = [(hosts.disk(LOGIN) / "logs" / f"rank.{rank}") for rank in range(4)]
        outputs = [((folder / "stdout").read_bytes(), (folder / "stderr").read_bytes()) for folder in kept]
    assert ended.code == 0, ended.stderr
    ranks = told(ended.stdout)
    assert [ranks[rank]["host"] for rank in range(4)] == ["h1", "h1", "h2", "h2"]
    assert [ranks[rank]["TFDISTKIT_LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    for rank, one in ranks.items():
        assert (one["argv"], one["SECRET"], one["FROM_SHELL"], one["TFDISTKIT_RANK"]) == (
            ODD,
            SECRET,
            "1 & 2",
            str(rank),
        )
        assert one["cwd"] == one["PWD"] == str(hosts.work)
        cluster = from_tf_config(one["TF_CONFIG"])
        assert cluster.rank == rank and (cluster.local_rank, cluster.local_world_size) == (rank % 2, 2)
        assert [address.rpartition(":")[0] for address in cluster.workers] == ["10.77.0.1"] * 2 + ["10.77.0.2"] * 2
        assert len(set(cluster.workers)) == 4
    for stdout, stderr in outputs:
        assert stdout.endswith(bytes(range(256)) * 4000) and stderr == b"to stderr\n"
    assert not [path for number in (LOGIN, *hosts.numbers) for path in hosts.disk(number).glob("*was-here*")]
    table = [line.split() for line in ended.stderr.splitlines() if line.startswith("h")]
    assert [row[0] for row in table] == ["host", "h1", "h2"]
    assert [row[-5:] for row in table[1:]] == [["eth0", f"10.77.0.{n}", "2", "free", "reached"] for n in (1, 2)]


def test_a_failure_on_another_host_is_reported_like_a_local_one(hosts: NetHosts) -> None:
    """This machine is in the list: it needs no ssh. The interface is asked for, where it is not called eth0."""
    script = str(
        hosts.write(
            "train.py",
            """
        import os, time
        print("up", flush=True)
        def deep():
            raise KeyError("lost")
        if os.environ["TFDISTKIT_RANK"] == "1":
            deep()
        time.sleep(600)
    """,
        )
    )
    ended = run_on_hosts(hosts, "-H", "h0:1,h2:1,h1:7", "-np", "2", "--log-dir", "logs", script)
    assert ended.code == 1
    record = json.loads((hosts.disk(LOGIN) / "logs" / "rank.1" / "error.json").read_text())
    report = ended.stderr[ended.stderr.index("tfdistkit: the job failed") :]
    assert f"rank 1 raised KeyError (host h2, pid {record['pid']}, exit code 1)" in report
    assert "raise KeyError" in report and "Stopped because of it: rank 0." in report
    assert re.search(r"^h0 +here .* br0 10.77.0.254", ended.stderr, re.MULTILINE), ended.stderr
    assert not re.search("^h1 ", ended.stderr, re.MULTILINE), "it has nothing to do"


def test_ranks_of_horovod_meet_on_the_first_host(hosts: NetHosts) -> None:
    """As far as the launcher is concerned: a Horovod that is there in name only."""
    script = str(
        hosts.write(
            "train.py",
            """
        import json, os, urllib.request
        told = {name[8:]: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
        url = f"http://{told['GLOO_RENDEZVOUS_ADDR']}:{told['GLOO_RENDEZVOUS_PORT']}/local/{told['RANK']}"
        urllib.request.urlopen(urllib.request.Request(url, data=b"here", method="PUT"), timeout=30)
        address, _, secret = told["GLOO_RENDEZVOUS_ADDR"].partition("/")
        assert len(secret) == 32 and address.endswith(":" + told["GLOO_RENDEZVOUS_PORT"]), told
        told["store"] = address.partition(":")[0]
        print(json.dumps({**told, "stored": urllib.request.urlopen(url, timeout=30).read().decode(),
                          "TF_CONFIG": os.environ.get("TF_CONFIG")}), flush=True)
    """,
        )
    )
    for number in hosts.numbers:
        package = hosts.disk(number) / "horovod-0.28.1.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    path = f"PYTHONPATH={hosts.work}{os.pathsep}{PATHS}"
    ended = run_on_hosts(hosts, "-H", "h1:2,h2", "--backend", "horovod", "-x", path, script, TF_CONFIG="{}")
    assert ended.code == 0, ended.stderr
    ranks = told(ended.stdout)
    names = ("RANK", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "GLOO_IFACE")
    names = (*names, "store", "stored")
    assert [[ranks[rank][name] for name in names] for rank in range(3)] == [
        ["0", "0", "0", "2", "10.77.0.1", "eth0", "10.77.0.1", "here"],
        ["1", "1", "0", "1", "10.77.0.1", "eth0", "10.77.0.1", "here"],
        ["2", "0", "1", "2", "10.77.0.2", "eth0", "10.77.0.1", "here"],
    ]
    assert {one["TF_CONFIG"] for one in ranks.values()} == {None}


def test_roles_restarts_and_modules(hosts: NetHosts) -> None:
    """The coordinator is on the first host, the servers are spread; a second attempt connects again."""
    hosts.write(
        "part.py",
        """
        import json, os, time
        cluster = json.loads(os.environ["TF_CONFIG"])
        print(json.dumps({"on": os.uname().nodename, **cluster["task"]}), flush=True)
        if os.environ["TFDISTKIT_ATTEMPT"] == "0" and cluster["task"]["type"] == "chief":
            raise SystemExit(7)
        time.sleep(0 if cluster["task"]["type"] == "chief" else 600)
    """,
    )
    ended = run_on_hosts(hosts, "-H", "h1,h2", "--ps", "2", "--max-restarts", "1", "-m", "part")
    assert ended.code == 0, ended.stderr
    assert "chief ended with exit code 7" in ended.stderr and ended.stderr.count("reached") == 4
    places = {
        f"{one['type']} {one['index']}": one["on"]
        for one in (json.loads(line[line.index("{") :]) for line in ended.stdout.splitlines())
    }
    assert places == {"chief 0": "h1", "worker 0": "h1", "worker 1": "h2", "ps 0": "h1", "ps 1": "h2"}


SCRIPT = "open('started', 'w')"


def refused(hosts: NetHosts, *words: str, **options: float) -> Ended:
    """Runs a job that the preflight check rejects: nothing was started."""
    hosts.write("train.py", SCRIPT, LOGIN)
    ended = run_on_hosts(hosts, *words, str(hosts.work / "train.py"), deadline_s=60, **options)
    assert ended.code == 2 and "so nothing was started" in ended.stderr, ended.stderr
    assert not [path for number in hosts.numbers for path in hosts.disk(number).glob("started")]
    return ended


def problems_of(host: str, ended: Ended) -> str:
    return "\n".join(line for line in ended.stderr.splitlines() if line.startswith(f"{host}: "))


@pytest.fixture
def silent_h2(hosts: NetHosts) -> Iterator[None]:
    hosts.signal_server(2, signal.SIGSTOP)
    yield
    hosts.signal_server(2, signal.SIGCONT)


def test_hosts_that_cannot_be_reached(hosts: NetHosts, silent_h2: None) -> None:
    started = time.monotonic()
    hosts.write("train.py", SCRIPT, 1)
    ended = refused(hosts, "-H", "h1,h2,nowhere.invalid", "--start-timeout", "6")
    assert time.monotonic() - started < longer(30)
    assert "2 of 3 hosts are not ready, so nothing was started: h2, nowhere.invalid." in ended.stderr
    assert "It did not answer within 6 s (ssh h2). Check that it is on" in problems_of("h2", ended)
    assert "Could not resolve hostname" in problems_of("nowhere.invalid", ended)
    assert "Correct the name" in problems_of("nowhere.invalid", ended) and not problems_of("h1", ended)
    ended = refused(hosts, "-H", "h1,h0", "--ssh-port", "9", "--ssh-identity-file", str(hosts.folder / "id"))
    assert "Connection refused" in problems_of("h1", ended) and "--ssh-port PORT" in problems_of("h1", ended)


def test_hosts_that_differ(hosts: NetHosts) -> None:
    """The script, Python and packages; what is found on one of the hosts only is a problem of that host."""
    hosts.write("train.py", "another script", 1)
    ended = refused(hosts, "-H", "h1,h2")
    assert "Its script differs from that on this machine" in problems_of("h1", ended)
    assert "It cannot read the script (No such file or directory). Copy it" in problems_of("h2", ended)
    assert re.search(r"^h1 .* there +eth0 10.77.0.1 +1 free", ended.stderr, re.MULTILINE)

    for number in hosts.numbers:
        hosts.write("train.py", SCRIPT, number)
        wrapper = hosts.disk(number) / "python"
        older = "import sys;sys.version_info=(3,9,2);exec(sys.argv[1])"
        call = f"-c '{older}' \"$6\"" if number == 2 else '"$@"'
        wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} {call}\n")
        wrapper.chmod(0o755)
    ended = refused(hosts, "-H", "h1,h2", "--python", str(hosts.work / "python"))
    assert "tfdistkit needs Python 3.10 or newer, and this is 3.9" in problems_of("h2", ended)
    assert "--python PATH" in problems_of("h2", ended) and not problems_of("h1", ended)
    (hosts.disk(2) / "python").unlink()
    ended = refused(hosts, "-H", "h1,h2", "--python", str(hosts.work / "python"))
    assert "not found" in problems_of("h2", ended) or "No such file" in problems_of("h2", ended)

    hosts.write("tfdistkit.py", "__version__ = '0.0.1'", 2)
    found = hosts.disk(2) / "keras-99.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 99.0\n")
    ended = refused(hosts, "-H", "h0,h1,h2", "-x", f"PYTHONPATH={hosts.work}{os.pathsep}{PATHS}")
    assert re.search(
        "Keras is 99.0, and on the other hosts it is .*Install the same version on", problems_of("h2", ended)
    )
    assert re.search("It has tfdistkit 0.0.1, and this machine has .* -m pip install \\.", problems_of("h2", ended))
    assert not problems_of("h1", ended)


def test_interfaces_and_folders_that_are_not_there(hosts: NetHosts) -> None:
    for number in hosts.numbers:
        hosts.write("train.py", SCRIPT, number)
    ended = refused(hosts, "-H", "h1,h2", "--network-interface", "ib7")
    assert "no interface 'ib7' with an address. Choose one of these: --network-interface eth0 (10.77.0.1)" in (
        problems_of("h1", ended)
    )
    ended = refused(hosts, "-H", "h1,h2", "--working-dir", "/no/such/folder")
    assert "The folder /no/such/folder does not exist" in problems_of("h2", ended)
    # Each host has the address for itself alone: nobody can reach the others there.
    ended = refused(hosts, "-H", "h1,h0", "--network-interface", "lo")
    assert "It is the same machine as h1" in problems_of("h0", ended)
    ended = refused(hosts, "-H", "h1,root@10.77.0.1")
    assert "It is the same machine as h1" in problems_of("root@10.77.0.1", ended)


def test_a_firewall_between_the_hosts(hosts: NetHosts) -> None:
    """h1 is told to send h2's answers into the void: ssh to both works, and they do not reach each other."""
    for number in hosts.numbers:
        hosts.write("train.py", SCRIPT, number)
    hosts.run(1, "ip", "route", "add", "unreachable", "10.77.0.2/32")
    try:
        ended = refused(hosts, "-H", "h1,h2")
    finally:
        hosts.run(1, "ip", "route", "del", "unreachable", "10.77.0.2/32")
    assert "It cannot connect to h2 at 10.77.0.2:" in problems_of("h1", ended)
    assert "Open the ports between the hosts (firewall?)" in problems_of("h1", ended)
    assert re.search(r"^h1 .*not all$", ended.stderr, re.MULTILINE)


def test_a_dry_run_checks_and_starts_nothing(hosts: NetHosts) -> None:
    """On hosts whose shells greet everybody, as some do."""
    script = str(hosts.write("train.py", SCRIPT))
    greeting = '[ "$1" != -I ] || { echo Welcome; echo Mind the gap >&2; }'
    python = hosts.write("python", f'#!/bin/sh\n{greeting}\nexec {sys.executable} "$@"\n')
    for number in hosts.numbers:
        (hosts.disk(number) / "python").chmod(0o755)
    ended = run_on_hosts(hosts, "-H", "h1,h2", "--python", str(python), "--dry-run", script)
    assert ended.code == 0 and "reached" in ended.stdout
    assert re.search(r"^rank 1 on h2: .*TF_CONFIG=.* -m tfdistkit.worker", ended.stdout, re.MULTILINE)
    assert not [path for number in hosts.numbers for path in hosts.disk(number).glob("started")]


def test_a_full_disk_for_the_logs_does_not_hang(hosts: NetHosts) -> None:
    script = str(
        hosts.write(
            "train.py",
            """
        import os, sys
        for _ in range(100):
            print("x" * 10_000)
        sys.exit(int(os.environ["TFDISTKIT_RANK"]) * 5)
    """,
        )
    )
    full = hosts.disk(LOGIN) / "logs"
    full.mkdir(exist_ok=True)
    hosts.login("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(hosts.work / "logs"))
    try:
        ended = run_on_hosts(hosts, "-H", "h1:2", "--log-dir", str(hosts.work / "logs"), script)
    finally:
        hosts.login("umount", str(hosts.work / "logs"))
    assert ended.code == 5 and "rank 1 ended with exit code 5 (host h1" in ended.stderr
    assert "is not complete: [Errno 28] No space left on device" in ended.stderr
    assert ended.stdout.count("x" * 10_000) >= 100, "what is shown is whole"
    assert list(Path(full).iterdir()) == []
