"""`tfdistkit run --isolate`: the workers are unreachable from outside, and otherwise run as without it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gloo_ranks import why_no_namespaces
from job_process import DEADLINE_S, job, run_job, wait_until, write_script

from tfdistkit.errors import UnsupportedError
from tfdistkit.launcher.local import isolation

# Where hosts must be tested, these tests run, and fail without namespaces.
NO_NAMESPACES = "" if os.environ.get("TFDISTKIT_REQUIRE_HOSTS") == "1" else why_no_namespaces()
pytestmark = pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)

# Rank 0 listens as TensorFlow's servers do; rank 1 speaks to it, and waits for the end.
SERVER = """
    import os, pathlib, socket, sys, time
    place = pathlib.Path("port")
    if os.environ["TFDISTKIT_RANK"] == "0":
        server = socket.create_server(("0.0.0.0", 0))
        pathlib.Path("new").write_text(str(server.getsockname()[1]))
        os.rename("new", place)
        server.accept()[0].sendall(b"hello of a worker")
    else:
        while not place.exists():
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", int(place.read_text())), timeout=30) as peer:
            pathlib.Path("heard").write_bytes(peer.makefile("rb").read())
    while not pathlib.Path("end").exists():
        time.sleep(0.01)
    sys.exit(7 if os.environ["TFDISTKIT_RANK"] == "1" else 0)
"""


def reached(address: str, port: int) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(DEADLINE_S)
        return stranger.connect_ex((address, port)) == 0


@pytest.mark.parametrize("words", [[], ["--isolate"]], ids=["open", "isolated"])
def test_reachability_of_a_worker(tmp_path: Path, words: list[str]) -> None:
    script = write_script(tmp_path, SERVER)
    with job("-np", "2", *words, "--log-dir", "logs", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "heard")
        port = int((tmp_path / "port").read_text())
        wait_until(lambda: (tmp_path / "heard").read_bytes() == b"hello of a worker", "peers reach each other")
        assert reached("127.0.0.1", port) is (words == [])
        (tmp_path / "end").touch()
        ended = running.end()
        assert ended.code == 7 and "rank 1 ended with exit code 7" in ended.stderr, ended.stderr
        assert running.left() == []
    assert {path.stat().st_uid for path in tmp_path.rglob("*")} == {os.geteuid()}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_signals_end_an_isolated_job(tmp_path: Path, number: int, code: int) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        pathlib.Path("up" + os.environ["TFDISTKIT_RANK"]).touch()
        time.sleep(600)
    """,
    )
    with job("-np", "2", "--isolate", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "up0", tmp_path / "up1")
        running.process.send_signal(number)
        assert running.end().code == code
        wait_until(lambda: running.left() == [], "the end of all of it")


def test_loopback_is_the_only_interface(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import json, os, socket
        try:
            socket.create_connection(("192.0.2.1", 80), timeout=30)
        except OSError as error:
            problem = error.strerror
        print(json.dumps([os.readlink("/proc/self/ns/net"), [name for _, name in socket.if_nameindex()], problem]))
    """,
    )
    ended = run_job("-np", "2", "--isolate", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "starting 2 workers on this machine, in an isolated network: " in ended.stderr
    first, second = (json.loads(line[4:]) for line in ended.stdout.splitlines())
    assert first == second and first[0] != os.readlink("/proc/self/ns/net"), "one network for all ranks"
    assert first[1:] == [["lo"], "Network is unreachable"]


def test_the_store_of_horovods_ranks_is_inside(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, urllib.request
        place = [os.environ["HOROVOD_GLOO_RENDEZVOUS_" + name] for name in ("ADDR", "PORT")]
        rank = os.environ["HOROVOD_RANK"]
        url = "http://{}:{}/global/".format(*place)
        put = urllib.request.Request(url + rank, data=rank.encode(), method="PUT")
        urllib.request.urlopen(put, timeout=30)
        print([urllib.request.urlopen(url + other, timeout=30).read() for other in "01"])
    """,
    )
    ended = run_job("-np", "2", "--isolate", "--backend", "horovod", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert sorted(line[4:] for line in ended.stdout.splitlines()) == ["[b'0', b'1']"] * 2


@pytest.mark.parametrize("less", [[], ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]])
def test_the_host_name_resolves_inside(tmp_path: Path, less: list[str]) -> None:
    """Outside it is mostly that of a network card. Gloo binds to it, whatever interface it is told."""
    script = write_script(
        tmp_path,
        """
        import socket
        with socket.create_server((socket.gethostname(), 0)) as server:
            print(server.getsockname()[0], socket.create_connection(server.getsockname(), timeout=30).getpeername()[0])
    """,
    )
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n192.0.2.77 {socket.gethostname()}\n")
    named = ["unshare", "--mount", "sh", "-c", 'mount --bind hosts /etc/hosts && exec "$@"', "sh", *less]
    command = [*named, sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--isolate", script]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] 192.0.2.77 192.0.2.77", "[1] 192.0.2.77 192.0.2.77"]


def test_without_root_privileges(tmp_path: Path) -> None:
    """As for any other user: a user namespace, and the workers' files are the user's."""
    script = write_script(
        tmp_path,
        """
        import os, pathlib, socket
        pathlib.Path("made" + os.environ["TFDISTKIT_RANK"]).touch()
        print(os.geteuid(), pathlib.Path("/proc/self/uid_map").read_text().split(), len(socket.if_nameindex()))
    """,
    )
    less = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    command = [*less, sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--isolate", script]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    user = os.geteuid()
    assert {line[4:] for line in ended.stdout.splitlines()} == {f"{user} {[str(user), str(user), '1']} 1"}
    assert {(tmp_path / f"made{rank}").stat().st_uid for rank in range(2)} == {user}


def test_a_system_that_forbids_it(tmp_path: Path) -> None:
    script = write_script(tmp_path, "open('ran', 'w')")
    forbids = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbids, "sh", sys.executable, "-m", "tfdistkit"]
    command += ["run", "-np", "2", "--isolate", script]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2 and not (tmp_path / "ran").exists()
    assert "--isolate does not work here: the system refuses a network namespace." in ended.stderr
    assert "sysctl user.max_net_namespaces=" in ended.stderr and "Or leave out --isolate" in ended.stderr


@pytest.mark.parametrize("words", [["-H", "localhost:2"], ["--backend", "slurm"]])
def test_jobs_on_other_machines_are_rejected(tmp_path: Path, words: list[str]) -> None:
    script = write_script(tmp_path, "open('ran', 'w')")
    ended = run_job("-np", "2", "--isolate", *words, script, cwd=tmp_path)
    assert ended.code == 2 and "--isolate requires a job on this machine only" in ended.stderr
    assert not (tmp_path / "ran").exists()


def test_other_systems_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation.sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="--isolate needs Linux.*darwin"):
        isolation.isolate()
