"""Workers as actors of a Ray cluster: each actor runs an agent (`ssh.agent.main`), and the agent runs the worker.

So workers are real processes, watched, logged and stopped as over ssh. A process of its own, the Ray driver, carries
the bytes between the launcher and the agents; this process imports no Ray.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tfdistkit import env
from tfdistkit.launcher.local import backend as local
from tfdistkit.launcher.local import watchdog
from tfdistkit.launcher.planning import available_cores, roles_of_tasks
from tfdistkit.launcher.ray.cluster import LOCAL, RaySpec, bundle_of, group_of, require_ray
from tfdistkit.launcher.ray.connection import ActorConnection, Pipes
from tfdistkit.launcher.ray.driver_process import DriverProcess
from tfdistkit.launcher.ray.nodes import check_nodes, ranks_by_node
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.launcher.ssh.backend import AGENT_OPTIONS, agent_line, start_worker
from tfdistkit.launcher.ssh.connection_pool import ConnectionPool
from tfdistkit.launcher.ssh.suspend import SuspendNotifier
from tfdistkit.launcher.ssh.workers import RemoteWorker

_GOODBYE_S = 8.0
# A cluster that lives as long as one job reports nothing to Ray's makers, unless the user says so.
_USAGE = "RAY_USAGE_STATS_ENABLED"


class Launcher(local.Launcher):
    """Starts workers as Ray actors (see `backend.Backend`).

    Args:
        job: The job, whose hosts are a `RaySpec`.
        should_stop: Whether to abort the start.

    Raises:
        MissingDependencyError: if Ray is not installed.
        UnsupportedError: if the cluster cannot be reached, lacks resources, or a node fails the preflight check.
    """

    def __init__(self, job: JobSpec, should_stop: Callable[[], bool] = lambda: False):
        assert isinstance(job.hosts, RaySpec)
        require_ray()
        super().__init__(job.job_id, job.size)
        self._cluster = job.hosts
        self._folder = Path(tempfile.mkdtemp(prefix="tfdistkit-ray-"))
        self._pool = ConnectionPool()
        self._pause = SuspendNotifier(self._pool)
        self._driver: DriverProcess | None = None
        # Of each process, in order.
        self._connections: list[ActorConnection] = []
        # The name of the Ray node of each process, in order.
        self.nodes: tuple[str, ...] = ()
        try:
            version, addresses = self._connect(job, should_stop)
            checked = check_nodes(self._pool, self._connections, addresses, job, should_stop, self.nodes)
            # The Python of each process: nodes may have it at different paths. The plan shows the first.
            self._pythons = [self._cluster.python or python for python in checked.pythons]
            self.python = self._pythons[0]
            # The placement of each process, in order, and the preflight report.
            self.places, self.table = checked.places, f"{version}\n{checked.table}"
            self._pool.watch()
        except BaseException:
            self.close()
            raise

    @property
    def blindness_s(self) -> float:  # type: ignore[override]
        return max(local.Launcher.blindness_s, self._pool.doubt_s())

    def start(self, spec: ProcessSpec) -> RemoteWorker:  # type: ignore[override]
        connection = self._connections[spec.number]
        return start_worker(
            self._pool,
            connection,
            spec,
            command=[self._pythons[spec.number], *spec.command[1:]],
            folder=self._cluster.folder,
            variables=dict(spec.env),
        )

    def wait(self, timeout_s: float) -> None:
        self._pool.wait_for_change(timeout_s)

    def close(self) -> None:
        if self._is_closed:
            return
        self._pause.close()
        self._pool.close(_GOODBYE_S)
        if self._driver is not None:
            self._driver.close()
            self._tell_watchdog(f"-{self._driver.pid}\n")
        for number, one in enumerate(self._connections):
            if one.loss is not None:
                # Its agent ends the worker by itself, with time to end; on this machine it must not outlive the job.
                watchdog.kill_all([], self._mark_of(number))
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _mark_of(self, number: int) -> str:
        """Returns the mark of the processes of one agent, which kills all with its mark and must not match others."""
        return f"{env.JOB_ID}={self._job_id}.{number}"

    def _connect(self, job: JobSpec, should_stop: Callable[[], bool]) -> tuple[str, list[str]]:
        """Starts the driver and the actors; returns Ray's version, and the address of the node of each process."""
        pipes = [Pipes() for _ in range(job.size)]
        cluster = self._cluster
        task = {
            "address": cluster.ray_address,
            "group": f"{group_of(job.job_id)}{secrets.token_hex(4)}",
            "nodes": cluster.nodes,
            "bundles": [bundle_of(cluster, role) for role in roles_of_tasks(job)],
            "timeout_s": cluster.start_timeout_s,
            "cores": available_cores(),
            "command": AGENT_OPTIONS,
        }
        usage = {_USAGE: env.text(_USAGE) or "0"} if cluster.ray_address == LOCAL else {}
        # The job's mark: daemons of a cluster on this machine inherit it, and the watchdog kills them too.
        variables = env.child_env({env.JOB_ID: job.job_id, **usage})
        self._driver = DriverProcess(task, pipes, variables, self._folder / "driver.log")
        self._tell_watchdog(f"+{self._driver.pid}\n")
        version, nodes = self._driver.wait_until_ready(should_stop)
        order = ranks_by_node([str(one["address"]) for one in nodes], roles_of_tasks(job))
        for number, index in enumerate(order):
            line = agent_line(self._mark_of(number))
            self._connections.append(ActorConnection(nodes[index]["host"], pipes[index], line))
            self._pool.add(self._connections[-1])
        self.nodes = tuple(str(nodes[index]["node"]) for index in order)
        return version, [str(nodes[index]["address"]) for index in order]
