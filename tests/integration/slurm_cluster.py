"""A real SLURM on this machine: a login host and nodes, each with its own network, name and list of hosts.

munged, slurmctld and slurmd run for the time of the tests only, with configuration, keys and ports of their own; a
SLURM of the machine itself is not touched. A host is a set of namespaces that a process holds open; all of its daemons
are children of the tests, and are killed with them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Generous: the machine may be busy.
DEADLINE_S = 60.0

# In this order: as text, n10 comes before n2.
NODES = ("n1", "n2", "n3", "n10")
LOGIN = "login"
_LOGIN_ADDRESS = 254
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "ip", "unshare", "nsenter", "setpriv")
_HOW_TO_INSTALL = "apt-get install slurmctld slurmd slurm-client munge iproute2"
# Debian keeps daemons where a user's PATH does not look.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

_HOST = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" "$4" && ip link set lo up &&
echo ready && exec cat
"""

_CONFIGURATION = """
ClusterName=tfdistkit
SlurmctldHost={login}({address})
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=3
WaitTime=0
TreeWidth=65533
SchedulerParameters=sched_interval=1,batch_sched_delay=1,bf_interval=1,bf_continue
"""


def why_no_slurm() -> str:
    """Returns why this machine cannot run a SLURM for the tests, in one line; empty if it can."""
    if os.geteuid() != 0:
        return "only root may start hosts and SLURM's daemons"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"not found: {', '.join(missing)} ({_HOW_TO_INSTALL})"
    namespaces = ["unshare", "--net", "--uts", "--mount", "true"]
    tried = subprocess.run(namespaces, capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Host:
    """A machine of the cluster: `prefix` before a command runs it there, in the root folder."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]

    @property
    def prefix(self) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--uts", "--mount", "--"]

    def command(self, cwd: Path, *words: str) -> list[str]:
        """Returns what runs a command on this host, in a folder."""
        return [*self.prefix, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *words]

    def pids(self) -> list[int]:
        """Returns the living processes of this host."""
        own = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):  # it has just ended
                if name.isdigit() and int(name) != self.holder.pid and os.readlink(f"/proc/{name}/ns/net") == own:
                    found.append(int(name))
        return found

    def pids_with(self, variable: str) -> list[int]:
        """Returns those of its processes that carry a variable `NAME=value`."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def power_off(self) -> None:
        """Kills everything on this host from one moment to the next."""
        wait_until(self._kill_all, f"the end of all processes on {self.name}")

    def _kill_all(self) -> bool:
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids


@dataclass(frozen=True)
class SlurmCluster:
    """A running SLURM.

    Args:
        folder: What belongs to it; `work` in it is for the tests.
        login: Where users type.
        nodes: By their names.
    """

    folder: Path
    login: Host
    nodes: dict[str, Host]
    daemons: dict[str, subprocess.Popen[bytes]]

    @property
    def hosts(self) -> list[Host]:
        return [self.login, *self.nodes.values()]

    def variables(self, **more: str) -> dict[str, str]:
        """Returns the environment of a user, as that of the tests."""
        return {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def start(self, *words: str, cwd: Path, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a command on the login host; both of its outputs go to a file."""
        with log.open("wb") as file:
            return subprocess.Popen(
                self.login.command(cwd, *words),
                env=self.variables(**variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # A shell that runs the tests in the background ignores Ctrl-C, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )

    def run(
        self, *words: str, cwd: Path | None = None, deadline_s: float = DEADLINE_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login host to its end, with a deadline."""
        return subprocess.run(
            self.login.command(cwd or self.folder, *words),
            env=self.variables(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )

    def ask(self, *words: str) -> str:
        """Returns what a command prints, which must succeed."""
        ended = self.run(*words)
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Returns what SLURM knows of a job."""
        words = self.ask("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start_node(self, name: str) -> None:
        """Starts a node's daemon, and waits until SLURM uses it."""
        command = ["slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf")]
        self.daemons[name] = _daemon(self.nodes[name], command, self.variables(), self.folder / "log" / f"{name}.out")

    def wait_for_nodes(self) -> None:
        """Waits until all nodes are up and without work; half-way, does what an administrator would."""
        with contextlib.suppress(AssertionError):
            return self._wait_for_nodes()
        self.run("scontrol", "update", f"nodename={','.join(NODES)}", "state=resume")
        try:
            self._wait_for_nodes()
        except AssertionError as error:
            said = (self.folder / "log" / "slurmctld").read_text()[-3000:]
            raise AssertionError(f"{error}: {self._states()}\n{self.run('squeue').stdout}\n{said}") from error

    def _wait_for_nodes(self) -> None:
        wait_until(lambda: self._states().split().count("idle") == len(NODES), "all nodes idle")

    def _states(self) -> str:
        return self.run("sinfo", "-h", "-N", "-o", "%N %T %E").stdout


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts a SLURM of four nodes, and ends it with everything that runs in it.

    Args:
        folder: An empty one, in a path short enough for a socket.
    """
    for name in ("state", "log", "run", "work", "pmix", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    addresses = {LOGIN: f"10.77.0.{_LOGIN_ADDRESS}", **{n: f"10.77.0.{i}" for i, n in enumerate(NODES, start=1)}}
    _write_configuration(folder, addresses)
    with contextlib.ExitStack() as stack:
        hosts = {name: stack.enter_context(_host(folder, name, address)) for name, address in addresses.items()}
        _connect(hosts)
        nodes = {name: hosts[name] for name in NODES}
        cluster = SlurmCluster(folder, hosts[LOGIN], nodes, {})
        stack.callback(_end_daemons, cluster)
        variables = cluster.variables()
        munged = ["munged", "--foreground", "--force", "--num-threads=2"]
        munged += [f"--{name}={folder / 'run'}/munge.{name}" for name in ("key-file", "seed-file", "pid-file")]
        munged += [f"--socket={folder / 'run' / 'munge.sock'}", f"--log-file={folder / 'log' / 'munged'}"]
        cluster.daemons["munged"] = _daemon(hosts[LOGIN], munged, variables, folder / "log" / "munged.out")
        wait_until((folder / "run" / "munge.sock").exists, f"munged: {folder / 'log'}")
        slurmctld = ["slurmctld", "-D", "-f", str(folder / "slurm.conf")]
        cluster.daemons["slurmctld"] = _daemon(hosts[LOGIN], slurmctld, variables, folder / "log" / "slurmctld.out")
        for name in NODES:
            cluster.start_node(name)
        cluster.wait_for_nodes()
        yield cluster


def _write_configuration(folder: Path, addresses: dict[str, str]) -> None:
    key = folder / "run" / "munge.key-file"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    text = _CONFIGURATION.format(login=LOGIN, address=addresses[LOGIN], folder=folder)
    resources = "CPUs=8 RealMemory=1000 Gres=gpu:4"
    nodes = [f"NodeName={name} NodeAddr={addresses[name]} {resources} State=UNKNOWN" for name in NODES]
    partition = "PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO"
    (folder / "slurm.conf").write_text("\n".join([text, *nodes, partition, ""]))
    # SLURM hands out device files, and does not ask what they are of.
    for number in range(4):
        os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    # Each host binds a folder of its own there: PMIx takes the nodes of one machine for one.
    (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder / 'pmix'}\n")
    names = [f"{address} {name}" for name, address in addresses.items()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))


@contextlib.contextmanager
def _host(folder: Path, name: str, address: str) -> Iterator[Host]:
    own = folder / f"pmix.{name}"
    own.mkdir()
    words = ["sh", "-c", _HOST, "sh", name, str(folder / "hosts"), str(own), str(folder / "pmix")]
    command = ["unshare", "--net", "--uts", "--mount", "--", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"ready\n", f"{name} could not be set up"
            host = Host(name, address, holder)
            yield host
            host.power_off()
        finally:
            holder.kill()


def _connect(hosts: dict[str, Host]) -> None:
    """All hosts at one switch, which is in the login host."""
    login = hosts[LOGIN]
    _ip(login, "link add switch type bridge")
    _ip(login, f"address add {login.address}/24 dev switch")
    _ip(login, "link set switch up")
    for number, name in enumerate(NODES, start=1):
        node = hosts[name]
        _ip(login, f"link add to-{name} type veth peer name eth0 netns {node.holder.pid}")
        _ip(login, f"link set to-{name} master switch up")
        _ip(node, f"address add {node.address}/24 dev eth0")
        _ip(node, f"link set eth0 address 02:77:00:00:00:{number:02x} up")


def _ip(host: Host, words: str) -> None:
    subprocess.run([*host.prefix, "ip", *words.split()], check=True, capture_output=True, timeout=DEADLINE_S)


def _daemon(host: Host, command: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *host.prefix, *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end_daemons(cluster: SlurmCluster) -> None:
    cluster.run("scancel", "--user=root", "--signal=KILL")
    for daemon in cluster.daemons.values():
        daemon.terminate()
    for host in cluster.hosts:
        host.power_off()
    for daemon in cluster.daemons.values():
        daemon.wait(timeout=DEADLINE_S)


def wait_until(condition: object, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits until something is true."""
    assert callable(condition)
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.05)
