"""Horovod's Gloo ranks started by hand, with nothing but its variables, each on a host of its own if need be."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from job_process import wait_until, write_script

from tfdistkit.cluster.environments.horovod import store_variables
from tfdistkit.launcher.local.watchdog import marked_processes

# Generous: the machine may be busy, and TensorFlow alone takes many seconds to load.
DEADLINE_S = 120.0

_STORE = """
import sys
from tfdistkit.cluster.rendezvous.gloo_store import GlooStore
store = GlooStore(2, host=sys.argv[1])
print(store.address[1], store.secret, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Host:
    """Where a rank runs: what comes before its command, its address, and the interface that has it."""

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    interface: str = "lo"


class GlooRank:
    """One running rank and what it prints."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: Path):
        self.rank, self.process, self.log = rank, process, log

    @property
    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        """Waits until the rank has printed something."""
        wait_until(lambda: text in self.printed or self.process.poll() is not None, self.printed, DEADLINE_S)
        assert self.process.poll() is None, f"rank {self.rank} ended: {self.printed}"

    def seconds_to_end(self, since: float) -> float:
        """Waits for the end, which must be that of an error; returns how long after `since` it came."""
        code = self.process.wait(timeout=DEADLINE_S)
        seconds = time.monotonic() - since
        assert code != 0, self.printed
        return seconds


@contextlib.contextmanager
def gloo_ranks(
    code: str, folder: Path, horovod: Path, hosts: tuple[Host, Host], **variables: str
) -> Iterator[list[GlooRank]]:
    """Starts a rank on each host, and the store where they meet on the first; at the end nothing is left.

    Args:
        code: The script.
        folder: Where script and logs go.
        horovod: A folder with Horovod, for PYTHONPATH.
        hosts: Where the ranks run; twice the same for one machine.
        **variables: For the environment of the ranks.
    """
    script = write_script(folder, code)
    path = [str(horovod), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    mark = f"TEST_MARK={uuid.uuid4().hex}"
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        **dict([mark.split("=")]),
        **{"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        **{"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"},
        **variables,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(_sweep, mark)
        command = [*hosts[0].prefix, sys.executable, "-c", _STORE, hosts[0].address]
        store = subprocess.Popen(command, env=common, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(store.wait, DEADLINE_S)
        stack.callback(store.kill)
        stack.enter_context(store.stdout)
        port, secret = store.stdout.readline().decode().split()
        running = []
        for rank, host in enumerate(hosts):
            log = folder / f"rank{rank}.log"
            told = {**common, **_variables(rank, hosts), **store_variables(hosts[0].address, int(port), secret)}
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*host.prefix, sys.executable, script],
                    env=told,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            stack.callback(process.wait, DEADLINE_S)
            stack.callback(process.kill)
            running.append(GlooRank(rank, process, log))
        yield running
        for one in running:
            one.process.poll()
        left = set(marked_processes(mark)) - {store.pid}
        assert left == set(), f"still there: {left}"


def _variables(rank: int, hosts: tuple[Host, Host]) -> dict[str, str]:
    together = hosts[0] == hosts[1]
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": str(rank if together else 0),
        "HOROVOD_LOCAL_SIZE": "2" if together else "1",
        "HOROVOD_CROSS_RANK": str(0 if together else rank),
        "HOROVOD_CROSS_SIZE": "1" if together else "2",
        "HOROVOD_HOSTNAME": hosts[rank].address,
        "HOROVOD_GLOO_IFACE": hosts[rank].interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _sweep(mark: str) -> None:
    for pid in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def why_no_namespaces() -> str:
    """Returns why this process cannot make hosts (network namespaces); empty if it can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"tfd{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except FileNotFoundError:
        return "there is no `ip` (apt-get install iproute2)"
    except subprocess.CalledProcessError as error:
        return f"`ip netns` does not work here: {error.stderr.decode().strip()}"
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts with a cable between them: network namespaces, which see nothing of this machine's network."""
    mark = uuid.uuid4().hex[:8]
    names = [f"tfd{mark}a", f"tfd{mark}b"]
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        hosts = []
        for number, name in enumerate(names, start=1):
            address = f"10.77.0.{number}"
            # `ip netns exec` shows this as /etc/hosts: Horovod looks up the host's own name for its process sets.
            etc = Path("/etc/netns", name)
            etc.mkdir(parents=True)
            stack.callback(_remove, etc)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            hosts.append(Host(("ip", "netns", "exec", name), address, "eth0"))
        yield hosts[0], hosts[1]


def _remove(etc: Path) -> None:
    shutil.rmtree(etc)
    with contextlib.suppress(OSError):  # Somebody else's are there too.
        etc.parent.rmdir()


def cut_link(host: Host) -> None:
    """Cuts a host off the network, from one moment to the next."""
    _ip("-n", host.prefix[-1], "link", "set", host.interface, "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
