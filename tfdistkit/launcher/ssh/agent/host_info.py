"""Facts about a host: addresses, free ports, versions, the script, connections to its peers.

Runs on the host without site-packages: imports only the standard library and sent modules.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdistkit.cluster import ports

# Linux: the ioctl for an interface's IPv4 address, see netdevice(7).
_SIOCGIFADDR = 0x8915
# Many hosts may connect at the same time.
_BACKLOG = 1024

# Runs in the workers' Python, with their working directory and environment.
_INSPECT_ENVIRONMENT = """
import hashlib, importlib.util, json, os, sys
from importlib import metadata
wanted = json.loads(sys.argv[1])
found = {"python": "%d.%d.%d" % sys.version_info[:3], "executable": sys.executable}
for package, names in wanted["packages"].items():
    for name in names:
        try:
            found[package] = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            found[package] = None
try:
    import tfdistkit
    found["tfdistkit"] = tfdistkit.__version__
except ImportError as error:
    found["tfdistkit"] = None
    found["why"] = str(error)
if wanted["module"]:
    sys.path.insert(0, os.getcwd())
    # find_spec also finds editable installs, which are not on sys.path.
    spec = importlib.util.find_spec(wanted["module"].partition(".")[0])
    found["script"] = "module" if spec else None
else:
    try:
        with open(wanted["script"], "rb") as file:
            found["script"] = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        found["script"] = None
        found["why_script"] = error.strerror
print("\\n" + json.dumps(found))
"""


def describe_host(names: Sequence[str]) -> dict[str, Any]:
    """Returns the facts about this host.

    Args:
        names: The environment variables to include.
    """
    ssh_connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "host": os.uname().nodename,
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "interfaces": list_interfaces(),
        "ssh_address": ssh_connection[2] if len(ssh_connection) == 4 else None,
        "variables": {name: os.environ[name] for name in names if name in os.environ},
        "time": time.time(),
    }


def list_interfaces() -> dict[str, str]:
    """Returns the network interfaces with an IPv4 address: name -> address."""
    import fcntl  # not on every system that imports this module

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return found


def own_address_towards(address: str) -> str | None:
    """Returns the source address of this host towards another one; None without a route.

    Args:
        address: The address of the other host.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # nothing is sent: the port does not matter
        except OSError:
            return None
        return str(probe.getsockname()[0])


def inspect_environment(
    python: str, folder: str, variables: Mapping[str, str], wanted: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """Inspects the environment of a worker: versions of Python and packages, the script.

    Args:
        python: The workers' Python; empty for that of this agent.
        folder: Their working directory.
        variables: Their environment.
        wanted: `packages` (name -> the names of its distributions), `script` or `module`.
        timeout_s: The timeout, in seconds.

    Returns:
        Versions by package, None for missing ones; `script`: the file's SHA-256, None if it is missing.

    Raises:
        OSError: if the folder or the Python does not exist.
        RuntimeError: if that Python fails, or the timeout expires.
    """
    os.stat(folder)
    python = python or sys.executable
    command = [python, "-c", _INSPECT_ENVIRONMENT, json.dumps(wanted)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{python} did not answer within {timeout_s:.0f} s") from None
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"{python} does not work: {' '.join(said) or f'exit code {done.returncode}'}") from None
    return found


class HeldPorts:
    """Free ports of this host, reserved until the workers start."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []

    def hold(self, count: int) -> list[int]:
        """Reserves free ports, and accepts connections on them."""
        self.release()
        found = ports.free_ports(count)
        for port in found:
            for listener in ports.bind("", port):
                self._listeners.append(listener)
                listener.listen(_BACKLOG)
        return found

    def release(self) -> None:
        """Releases the ports."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()


def connect_to(addresses: Sequence[tuple[str, int]], timeout_s: float) -> list[str | None]:
    """Tries to connect to other hosts in parallel.

    Args:
        addresses: The addresses and ports.
        timeout_s: The timeout, in seconds.

    Returns:
        None for each connection that succeeded, else the reason.
    """
    outcome: list[str | None] = ["no answer"] * len(addresses)
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for place, (host, port) in enumerate(addresses):
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.setblocking(False)
            code = probe.connect_ex((host, port))
            if code == errno.EINPROGRESS:
                selector.register(probe, selectors.EVENT_WRITE, place)
            else:
                outcome[place] = os.strerror(code) if code else None
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                outcome[key.data] = os.strerror(code) if code else None
    return outcome
