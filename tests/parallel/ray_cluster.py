"""A real Ray cluster on this machine: nodes that come and go, each with a CPU and, in name only, a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from job_process import wait_until

from tfdistkit.launcher.local.watchdog import kill_all

START_S = 90.0

# Nodes of one machine, as Ray's own tests start them. Each line of stdin kills the newest node, or adds one.
_HOLD = """
import sys
from ray.cluster_utils import Cluster
options = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
others = [cluster.add_node(**options) for _ in range(int(sys.argv[1]) - 1)]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "kill\\n":
        cluster.remove_node(others.pop(), allow_graceful=False)
    else:
        others.append(cluster.add_node(**options, wait=False))
    print("done", flush=True)
cluster.shutdown()
"""
# A cluster of tests asks for no token, and leaves none in the user's folder.
VARIABLES = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


class RayCluster:
    """A running cluster.

    Args:
        process: What holds it.
        log: What it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self._process, self._log = process, log
        wait_until(lambda: b"\n" in self._said() or process.poll() is not None, f"a cluster: {log}", START_S)
        self.address = self._said().split()[0].decode()

    def kill_node(self) -> None:
        """Kills the daemon of the newest node; it does not come back. The first one stays."""
        self._tell(b"kill\n")

    def add_node(self) -> None:
        """Adds a node."""
        self._tell(b"add\n")

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        before = self._said().count(b"done")
        self._process.stdin.write(line)
        wait_until(lambda: self._said().count(b"done") > before, "the end or the start of a node")

    def _said(self) -> bytes:
        return self._log.read_bytes()


@contextlib.contextmanager
def ray_cluster(folder: Path, nodes: int = 2) -> Iterator[RayCluster]:
    """Starts a cluster, and ends all of its processes.

    Args:
        folder: The folder for its log.
        nodes: Its number of nodes.
    """
    name, value = "TEST_RAY_MARK", uuid.uuid4().hex
    log = folder / "cluster.log"
    with log.open("wb") as stdout, (folder / "cluster.errors").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(nodes)],
            env={**os.environ, **VARIABLES, name: value},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,
        )
    try:
        yield RayCluster(process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=20)
        kill_all([], f"{name}={value}")
