"""Workers on several hosts over ssh: one connection and one agent (`ssh.agent.main`) per host.

The agent, the variables and the workers' commands are sent over the connection; no command line contains them. This
machine, if it is one of the hosts, runs an agent without ssh.
"""

from __future__ import annotations

import base64
import importlib.util
import inspect
import secrets
import shlex
import shutil
import subprocess
import zlib
from collections.abc import Callable
from typing import Any

from tfdistkit import env
from tfdistkit.cluster.addresses import join_address
from tfdistkit.cluster.environments import horovod
from tfdistkit.errors import MissingDependencyError, UnsupportedError, explain
from tfdistkit.launcher.hosts import HostsSpec, is_this_machine
from tfdistkit.launcher.local import backend as local
from tfdistkit.launcher.placement import Place
from tfdistkit.launcher.planning import hosts_of_tasks
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.launcher.ssh.agent import bootstrap
from tfdistkit.launcher.ssh.connection import Connection, Question
from tfdistkit.launcher.ssh.connection_pool import ConnectionPool
from tfdistkit.launcher.ssh.preflight import check_hosts
from tfdistkit.launcher.ssh.suspend import SuspendNotifier
from tfdistkit.launcher.ssh.workers import RemoteWorker
from tfdistkit.report.crashes import FILE_NAME as CRASH_FILE

# The modules of an agent, sent as source.
_AGENT = "tfdistkit.launcher.ssh.agent.main"
_PARTS = (
    _AGENT,
    "tfdistkit.errors",
    "tfdistkit.env",
    "tfdistkit.cluster.addresses",
    "tfdistkit.cluster.port_locks",
    "tfdistkit.cluster.ports",
    "tfdistkit.cluster.rendezvous.gloo_store",
    "tfdistkit.launcher.local.activity",
    "tfdistkit.launcher.local.phase_samples",
    "tfdistkit.launcher.local.blocked",
    "tfdistkit.launcher.local.py_spy",
    "tfdistkit.launcher.local.stack_request",
    "tfdistkit.launcher.local.watchdog",
    "tfdistkit.report.hangs.layout",
    "tfdistkit.launcher.ssh.agent.protocol",
    "tfdistkit.launcher.ssh.agent.progress",
    "tfdistkit.launcher.ssh.agent.host_info",
    "tfdistkit.launcher.ssh.agent.children",
    "tfdistkit.launcher.ssh.agent.links",
)

# The code on the remote command line; it reads the rest from the connection. It must contain no `!` and no backslash,
# which some shells interpret even between single quotes.
_FIRST_STEP = (
    'import sys;sys.exit("tfdistkit needs Python 3.10 or newer, and this is %d.%d" % sys.version_info[:2])'
    "if sys.version_info<(3,10)else "
    'exec(__import__("zlib").decompress(__import__("base64").b64decode(open(0,"rb",0,closefd=False).readline())))'
)

# The options of Python for an agent: nothing of the user's, and the first step.
AGENT_OPTIONS = ["-I", "-S", "-X", "utf8", "-c", _FIRST_STEP]

# ssh must not prompt, and must ignore commands, terminals and forwardings of the user's configuration.
_SSH_OPTIONS = ("BatchMode=yes", "RemoteCommand=none", "RequestTTY=no", "ClearAllForwardings=yes")

# Timeout for starting one process on a host, in seconds.
_START_S = 30.0
# Timeout for the agents to end the remaining processes, in seconds.
_GOODBYE_S = 8.0
# Timeout of a connection between two hosts, in seconds.
_CONNECT_S = 5.0


class Launcher(local.Launcher):
    """Starts workers on other hosts (see `backend.Backend`).

    Args:
        job: The job, with hosts.
        should_stop: Whether to abort while the hosts are connected and checked.

    Raises:
        UnsupportedError: if a host fails the preflight check; the message has one line per host.
        MissingDependencyError: if ssh is not installed.
    """

    def __init__(self, job: JobSpec, should_stop: Callable[[], bool] = lambda: False):
        assert job.hosts is not None
        super().__init__(job.job_id, job.world_size)
        self._hosts = job.hosts
        # The Python of the workers, for the plan.
        self.python = job.hosts.python
        self._more_variables: dict[str, str | None] = {}
        self._pool = ConnectionPool()
        self._pause = SuspendNotifier(self._pool)
        try:
            for number in sorted(set(hosts_of_tasks(job))):
                self._pool.add(self._connect(number, job.hosts.slots[number].host))
            checked = check_hosts(self._pool, job, should_stop)
            # The placement of each process, in order, and the preflight report.
            self.places, self.table = checked.places, checked.table
            if row_of(job.backend).needs_horovod:
                self._more_variables = self._open_store(job.world_size)
            self._pool.watch()
        except BaseException:
            self.close()
            raise

    @property
    def blindness_s(self) -> float:  # type: ignore[override]
        # Longer while a host is silent: it may turn out to be lost.
        return max(local.Launcher.blindness_s, self._pool.doubt_s())

    def start(self, spec: ProcessSpec) -> RemoteWorker:  # type: ignore[override]
        connection = self._connection(spec.host)
        return start_worker(
            self._pool,
            connection,
            spec,
            command=list(spec.command),
            folder=self._hosts.folder,
            variables={**spec.env, **self._more_variables},
        )

    def wait(self, timeout_s: float) -> None:
        self._pool.wait_for_change(timeout_s)

    def close(self) -> None:
        if self._is_closed:
            return
        self._pause.close()
        self._pool.close(_GOODBYE_S)
        for one in self._pool.connections:
            self._tell_watchdog(f"-{one.child.pid}\n")
        super().close()

    def measure(self, server: Place, client: Place, timeout_s: float) -> dict[str, float]:
        """Measures the network from one host to another: `bytes_per_s` and `round_trip_s`.

        Args:
            server: The host that receives.
            client: The host that sends.
            timeout_s: The timeout, in seconds.

        Raises:
            UnsupportedError: if they cannot connect, or the timeout expires.
        """
        serving, talking = self._connection(server.host), self._connection(client.host)
        port = self._answer(self._pool.ask(serving, "open_link", address=server.address), timeout_s)
        self._pool.ask(serving, "serve_link")
        link: dict[str, float] = self._answer(
            self._pool.ask(talking, "measure_link", address=server.address, port=port), timeout_s
        )
        return link

    def _connection(self, host: str) -> Connection:
        return next(one for one in self._pool.connections if one.host == host)

    def _answer(self, question: Question, timeout_s: float) -> Any:
        if not self._pool.wait_for(lambda: question.is_done, timeout_s):
            raise UnsupportedError(f"The host did not answer within {timeout_s:g} s.")
        if question.error is not None:
            raise UnsupportedError(question.error)
        return question.answer

    def _connect(self, number: int, host: str) -> Connection:
        python = [self._hosts.python, *AGENT_OPTIONS]
        is_here = is_this_machine(host)
        command = python if is_here else ssh_command(self._hosts, host, python)
        # One mark per host: an agent kills all processes with its mark, and must not match those of other hosts.
        mark = f"{env.JOB_ID}={self._job_id}.{number}"
        try:
            child = subprocess.Popen(
                command,
                env=env.child_env({env.JOB_ID: None}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise UnsupportedError(
                explain(
                    "`--python` must be the path of a Python on every host.",
                    received=f"{error.filename}, which does not exist on this machine",
                )
            ) from None
        if not is_here:
            # Without the launcher the agent exits on its own, but ssh does not.
            self._tell_watchdog(f"+{child.pid}\n")
        return Connection(host, child, agent_line(mark))

    def _open_store(self, world_size: int) -> dict[str, str | None]:
        """Opens the rendezvous store of Gloo's ranks on rank 0's host; returns the variables that name it."""
        first = self.places[0]
        connection = self._connection(first.host)
        secret = secrets.token_hex(16)
        options = {"world_size": world_size, "address": first.address, "secret": secret}
        opened = self._pool.ask(connection, "serve_store", **options)
        self._pool.wait_for(lambda: opened.is_done, _START_S)
        if opened.answer is None:
            what = f"The rendezvous store of Horovod's ranks could not be opened on {first.host}."
            raise UnsupportedError(explain(what, received=opened.error or f"no answer within {_START_S:g} s"))
        self._check_connections(first, opened.answer)
        return {
            env.TF_CONFIG: None,  # a TF_CONFIG of the remote shell describes another cluster
            **horovod.store_variables(first.address, opened.answer, secret),
        }

    def _check_connections(self, place: Place, port: int) -> None:
        """Checks that every host can connect to the store: Gloo uses ephemeral ports, blocked alike by a firewall."""
        address = [[place.address, port]]
        asked = {
            one.host: self._pool.ask(one, "connect", addresses=address, timeout_s=_CONNECT_S)
            for one in self._pool.connections
            if one.host != place.host
        }
        for host, question in asked.items():
            (why,) = self._answer(question, _START_S)
            if why is not None:
                raise UnsupportedError(
                    explain(
                        f"{host} cannot connect to the rendezvous store of Horovod's ranks on {place.host}.",
                        received=f"{join_address(place.address, port)}: {why}",
                        do="Open all ports between the hosts, as Gloo uses any of them, or use --backend local, which "
                        "uses one port per worker.",
                    )
                )


def start_worker(pool: ConnectionPool, connection: Connection, spec: ProcessSpec, **asked: Any) -> RemoteWorker:
    """Starts a worker by an agent.

    Args:
        pool: Serves the connection.
        connection: The connection to the agent.
        spec: The worker.
        **asked: The command, the working directory (`folder`) and the `variables`.

    Raises:
        UnsupportedError: if it cannot be started. A worker whose connection was lost is started, and lost.
    """
    worker, started = pool.start_worker(connection, spec, timeout_s=_START_S, record=CRASH_FILE, **asked)
    if connection.loss is None and (started.error is not None or not started.is_done):
        raise UnsupportedError(
            explain(
                f"{spec.name} could not be started on {spec.host}.",
                received=started.error or f"no answer within {_START_S:g} s",
            )
        )
    return worker


def ssh_command(hosts: HostsSpec, host: str, words: list[str]) -> list[str]:
    """Returns the ssh command that runs a command on a host.

    Args:
        hosts: The ssh options.
        host: The host, with the user's name before it if needed.
        words: The remote command; it is quoted for the remote shell.

    Raises:
        MissingDependencyError: if ssh is not installed.
    """
    ssh = shutil.which("ssh")
    if ssh is None:
        do = "Install it: apt-get install openssh-client"
        raise MissingDependencyError(explain("`ssh` was not found.", expected="OpenSSH on the PATH", do=do))
    options = [f"-o{option}" for option in _SSH_OPTIONS]
    if hosts.ssh_port is not None:
        options.append(f"-p{hosts.ssh_port}")
    if hosts.ssh_identity_file is not None:
        options += ["-i", hosts.ssh_identity_file]
    return [ssh, *options, "--", host, f"exec {shlex.join(words)}"]


def agent_line(mark: str) -> bytes:
    """Returns the line that turns a Python, started with `_FIRST_STEP`, into the agent of a host.

    Args:
        mark: `NAME=value`, which is set in the environment of all processes of the job on this host.
    """
    sources = {name: _source_of(name) for name in _PARTS}
    program = f"{inspect.getsource(bootstrap)}\nrun_sent({sources!r}, {_AGENT!r}, {mark!r})\n"
    return base64.b64encode(zlib.compress(program.encode(), level=1)) + b"\n"


def _source_of(name: str) -> str:
    """Reads the source of a module without importing it: some modules only work on the host."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    source: str = spec.loader.get_source(name)  # type: ignore[attr-defined]
    return source
