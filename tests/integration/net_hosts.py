"""Hosts with sshd on one machine: each has its own network, name, processes, and its own contents of a shared path.

A host is a set of namespaces that its first process holds open: when that is killed, all processes of the host are
gone, as with a power cut, and its network too. Nothing of the machine itself is changed.

    with net_hosts(tmp_path, 2) as hosts:
        hosts.write("train.py", "print('on every host, at hosts.work / train.py')")
        hosts.login("ssh", "h1", "hostname")         # from the login host, where every path is this machine's

`h0` is the login host, on 10.77.0.254, in the middle of a bridge; h1, h2, ... are 10.77.0.1, .2, ... They are told of
each other in /etc/hosts; ssh works from everywhere to everywhere without a question (/etc/ssh/ssh_config).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Generous: the machine may be busy.
DEADLINE_S = 60.0
SSH_PORT = 32022
LOGIN = 0
_LOGIN_ADDRESS = 254

_PROGRAMS = ("ip", "ssh", "sshd", "ssh-keygen", "unshare", "nsenter", "setpriv", "mount")
_INSTALL = "apt-get install openssh-server openssh-client iproute2"
# Debian keeps daemons where a user's PATH does not look.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

# The first process of a host: its files, its name; then it waits until it is killed. Where it is number 1, it collects
# orphans meanwhile.
_FIRST = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/ssh_config" /etc/ssh/ssh_config
mount --bind "$2/$1/work" "$2/work"
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ip link set lo up
echo up
[ "$1" != h0 ] || exec sleep infinity
while :; do sleep infinity & wait $!; done
"""

_SSH_CONFIG = """
Host *
    Port {port}
    IdentityFile {folder}/id
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""

_SSHD_CONFIG = """
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/id.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
MaxStartups 100
SetEnv TMPDIR={folder}/{name}/tmp
"""


def why_no_hosts() -> str:
    """Returns why this process cannot make hosts, in one line; empty if it can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} ({_INSTALL})"
    tried = _run("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true", check=False)
    return f"`unshare` does not work here: {tried.stderr.strip()}" if tried.returncode else ""


class NetHosts:
    """A login host and some hosts around it.

    Args:
        folder: Where everything of theirs is; no process looks elsewhere.
        count: How many hosts, besides the login host.
    """

    def __init__(self, folder: Path, count: int):
        self.folder = folder
        self.numbers = range(1, count + 1)
        # The same path on every host, with other contents; on this machine it is empty.
        self.work = folder / "work"
        self._first: dict[int, subprocess.Popen[str]] = {}
        self._servers: dict[int, subprocess.Popen[bytes]] = {}

    def make(self) -> None:
        """Makes keys and files, and starts all hosts."""
        self.work.mkdir(parents=True)
        addresses = [(self.address(number), self.name(number)) for number in (LOGIN, *self.numbers)]
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in addresses)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "ssh_config").write_text(_SSH_CONFIG.format(port=SSH_PORT, folder=self.folder))
        for key in ("id", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        public = (self.folder / "host_key.pub").read_text()
        known = [f"[{host}]:{SSH_PORT} {public}" for pair in addresses for host in pair]
        (self.folder / "known_hosts").write_text("".join(known))
        for number in (LOGIN, *self.numbers):
            self.start(number)

    def start(self, number: int) -> None:
        """Starts a host, or starts it again after it was killed; its files are those that it had."""
        name = self.name(number)
        for part in ("work", "tmp"):
            (self.folder / name / part).mkdir(parents=True, exist_ok=True)
        # The login host sees all processes: who starts one there gets the process itself, to signal and to wait for.
        own = [] if number == LOGIN else ["--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", *own]
        first = subprocess.Popen(
            [*command, "sh", "-c", _FIRST, "sh", name, str(self.folder)],
            env={**os.environ, "PATH": _PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.folder / name / "log").open("w"),
            text=True,
            start_new_session=True,
        )
        self._first[number] = first
        assert first.stdout is not None
        said = first.stdout.readline()
        assert said == "up\n", (self.folder / name / "log").read_text()
        if number == LOGIN:
            self._ip(LOGIN, "link", "add", "br0", "type", "bridge")
            self._ip(LOGIN, "address", "add", f"{self.address(LOGIN)}/24", "dev", "br0")
            self._ip(LOGIN, "link", "set", "br0", "up")
        else:
            self._plug(number)
            self._serve(number)

    def _plug(self, number: int) -> None:
        other_end = ["peer", "name", "eth0", "netns", str(self.first_pid(number))]
        self._ip(LOGIN, "link", "add", f"v{number}", "type", "veth", *other_end)
        self._ip(LOGIN, "link", "set", f"v{number}", "master", "br0", "up")
        self._ip(number, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        # A fixed one: the others have it in their tables when the host comes back.
        self._ip(number, "link", "set", "eth0", "address", f"02:77:00:00:00:{number:02x}", "up")

    def _serve(self, number: int) -> None:
        name = self.name(number)
        config = self.folder / name / "sshd_config"
        config.write_text(_SSHD_CONFIG.format(port=SSH_PORT, folder=self.folder, name=name))
        sshd = shutil.which("sshd", path=_PATH) or "sshd"
        command = [sshd, "-D", "-f", str(config), "-E", str(self.folder / name / "sshd.log")]
        self._servers[number] = subprocess.Popen(self.command(number, *command), stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_S
        while _run(*self.command(number, "sh", "-c", _LISTENS), check=False).returncode:
            assert time.monotonic() < deadline, (self.folder / name / "sshd.log").read_text()
            time.sleep(0.02)

    def name(self, number: int) -> str:
        """Returns `h1`."""
        return f"h{number}"

    def address(self, number: int) -> str:
        """Returns `10.77.0.1`."""
        return f"10.77.0.{number or _LOGIN_ADDRESS}"

    def disk(self, number: int) -> Path:
        """Returns where this machine sees what a host has at `work`."""
        return self.folder / self.name(number) / "work"

    def temporary(self, number: int) -> Path:
        """Returns where processes that came by ssh make their temporary files, as this machine sees it."""
        return self.folder / self.name(number) / "tmp"

    def write(self, name: str, text: str, *numbers: int) -> Path:
        """Writes a file on some hosts (on all, if left out, the login host too); returns its path there."""
        for number in numbers or (LOGIN, *self.numbers):
            (self.disk(number) / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return self.work / name

    def clean(self) -> None:
        """Removes all files of all hosts."""
        for number in (LOGIN, *self.numbers):
            for folder in (self.disk(number), self.temporary(number)):
                # Not the folder itself: it is mounted.
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def command(self, number: int, *words: str) -> list[str]:
        """Returns the command that runs a command on a host, in its folder `work`.

        On the login host it becomes that command; elsewhere it is its parent, and signals go to the parent only.
        """
        own = [] if number == LOGIN else ["--pid"]
        enter = ["nsenter", "--target", str(self.first_pid(number)), "--net", "--uts", "--mount", *own]
        return [*enter, "env", "--chdir", str(self.work), *words]

    def run(self, number: int, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host, in its folder `work`."""
        return _run(*self.command(number, *words), **options)

    def login(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login host, in its folder `work`."""
        return self.run(LOGIN, *words, **options)

    def first_pid(self, number: int) -> int:
        """Returns the first process of a host, by the number that this machine knows it by."""
        process = self._first[number]
        if number == LOGIN:
            return process.pid
        return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])

    def pids(self, number: int) -> list[int]:
        """Returns the living processes of a host, by the numbers that this machine knows them by; none if it is off.

        Its first process, its sshd and what they need are not counted.
        """
        if self.is_off(number):
            return []
        network = os.stat(f"/proc/{self.first_pid(number)}/ns/net").st_ino
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                # A zombie has no command line any more.
                if os.stat(f"/proc/{pid}/ns/net").st_ino == network and words and not _is_furniture(words):
                    found.append(pid)
        return found

    def kill(self, number: int) -> None:
        """Switches a host off: all of its processes are killed, sshd too, and nobody says goodbye."""
        os.kill(self.first_pid(number), signal.SIGKILL)
        self._collect(number)
        # The kernel takes a dead network away when it has time; until then a new cable cannot have the old one's name.
        self._ip(LOGIN, "link", "delete", f"v{number}", check=False)

    def is_off(self, number: int) -> bool:
        """Whether a host was switched off."""
        return self._first[number].poll() is not None

    def pull_cable(self, number: int) -> None:
        """Cuts a host off the network; its processes go on, and nobody is told."""
        self._ip(LOGIN, "link", "set", f"v{number}", "down")

    def plug_cable(self, number: int) -> None:
        """Connects it again."""
        self._ip(LOGIN, "link", "set", f"v{number}", "up")

    def shape(self, number: int, rate: str | None) -> None:
        """Limits what a host sends, such as to `100mbit`; None takes the limit away."""
        self.run(number, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        if rate is not None:
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            self.run(number, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)

    def signal_server(self, number: int, signal_number: int) -> None:
        """Sends a signal to the sshd of a host: a stopped one takes connections, and never answers."""
        server = self._servers[number].pid
        child = Path(f"/proc/{server}/task/{server}/children").read_text().split()[0]
        os.kill(int(child), signal_number)

    def close(self) -> None:
        """Kills all that is left."""
        for number in self._first:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):
                os.kill(self.first_pid(number), signal.SIGKILL)
            self._collect(number)

    def _collect(self, number: int) -> None:
        if number in self._servers:
            # `nsenter` stops itself when what it started is stopped; only when it goes on, the host can be gone.
            self._servers[number].send_signal(signal.SIGCONT)
        self._first[number].wait(timeout=DEADLINE_S)
        if self._first[number].stdout is not None:
            self._first[number].stdout.close()
        if number in self._servers:
            self._servers[number].wait(timeout=DEADLINE_S)

    def _ip(self, number: int, *words: str, check: bool = True) -> None:
        _run("nsenter", "--target", str(self.first_pid(number)), "--net", "ip", *words, check=check)


# Port 32022 in state LISTEN (0A): see proc_net_tcp(5).
_LISTENS = f"grep -qi ':{SSH_PORT:04x} 0\\+:0\\+ 0A' /proc/net/tcp"


def _is_furniture(words: bytes) -> bool:
    """Whether a command line is that of a process which belongs to the host itself."""
    starts = (b"sh\0-c\0\nset -e\nhostname ", b"sleep\0infinity\0", b"unshare\0", b"nsenter\0")
    return words.startswith(starts) or b"[listener]" in words


@contextlib.contextmanager
def net_hosts(folder: Path, count: int) -> Iterator[NetHosts]:
    """Makes hosts; afterwards there are none, whatever failed.

    Args:
        folder: An empty folder for all that is theirs.
        count: How many, besides the login host.
    """
    hosts = NetHosts(folder, count)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.close()


def _run(*words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"timeout": DEADLINE_S, "env": {**os.environ, "PATH": _PATH}, **options}
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, **options)
    assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
