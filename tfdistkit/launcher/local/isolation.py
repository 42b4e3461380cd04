"""`--isolate`: run a job on one machine in a network namespace that has only a loopback interface.

TensorFlow's servers listen on all interfaces without authentication. In its own namespace, a job is unreachable from
outside. This process enters the namespace before it starts anything, so the launcher and all workers share it. The
kernel removes the namespace with the last process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence

from tfdistkit.errors import UnsupportedError, explain

# See unshare(2), netdevice(7), user_namespaces(7).
_NEW_USER = 0x10000000
_NEW_NETWORK = 0x40000000
_GET_FLAGS, _SET_FLAGS, _SET_ADDRESS, _SET_MASK = 0x8913, 0x8914, 0x8916, 0x891C
_UP = 0x1
# `struct ifreq`: the name, the value, and padding.
_REQUEST = struct.Struct("16sh22x")
_ADDRESS_REQUEST = struct.Struct("16sHxx4s16x")
_LOOPBACK = b"lo"

_FIREWALL = "Or leave out --isolate, and let a firewall close this machine's ports to others."
# Kernel settings that can forbid it: name, the forbidding value, an allowing value. Not every system has all of them.
_SWITCHES = (
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user.max_user_namespaces", "0", "10000"),
    ("user.max_net_namespaces", "0", "10000"),
)
_REASONS = {
    errno.EPERM: "Operation not permitted",
    errno.ENOSPC: "the system's limit of namespaces is reached",
    errno.EINVAL: "the kernel does not support it, or this process has more than one thread",
}


def isolate() -> None:
    """Moves this process, and all processes that it starts later, into a new network namespace.

    This process must have a single thread. Root stays root. Other users keep their id, in a user namespace that maps no
    other id: file ownership is unchanged, but `sudo` no longer works.

    Raises:
        UnsupportedError: if the system refuses the namespace to this user.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            explain("--isolate needs Linux and its network namespaces.", received=sys.platform, do=_FIREWALL)
        )
    user, group, own_addresses = os.geteuid(), os.getegid(), _own_addresses()
    try:
        try:
            _unshare(_NEW_NETWORK)
        except PermissionError:
            _unshare(_NEW_USER | _NEW_NETWORK)
            _map_own_ids(user, group)
        _raise_loopback(own_addresses)
    except OSError as error:
        raise UnsupportedError(
            explain(
                "--isolate does not work here: the system refuses a network namespace.",
                received=f"{_REASONS.get(error.errno or 0, str(error))}, as user {user}",
                do=f"{_advice()} {_FIREWALL}",
            )
        ) from error


def _unshare(flags: int) -> None:
    # `os.unshare` exists only from Python 3.12 on.
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _map_own_ids(user: int, group: int) -> None:
    """Maps this user and group to themselves: a new user namespace has no ids."""
    with contextlib.suppress(FileNotFoundError):  # before Linux 3.19
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    # Unbuffered: the kernel requires a map in a single write, and reports errors from it.
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _own_addresses() -> list[str]:
    """Returns the IPv4 addresses of this machine's host name: Gloo binds to them, whatever interface is set."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [address for address in dict.fromkeys(str(one[4][0]) for one in found) if not address.startswith("127.")]


def _raise_loopback(own_addresses: Sequence[str]) -> None:
    """Raises the loopback interface with 127.0.0.1 and ::1, and adds the host name's addresses as aliases."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _, flags = _REQUEST.unpack(fcntl.ioctl(control, _GET_FLAGS, _REQUEST.pack(_LOOPBACK, 0)))
        fcntl.ioctl(control, _SET_FLAGS, _REQUEST.pack(_LOOPBACK, flags | _UP))
        for number, address in enumerate(own_addresses):
            alias = b"%b:%d" % (_LOOPBACK, number)
            for set_what, value in ((_SET_ADDRESS, address), (_SET_MASK, "255.255.255.255")):
                fcntl.ioctl(control, set_what, _ADDRESS_REQUEST.pack(alias, socket.AF_INET, socket.inet_aton(value)))


def _advice() -> str:
    for name, forbids, allows in _SWITCHES:
        with contextlib.suppress(OSError), open(f"/proc/sys/{name.replace('.', '/')}", encoding="ascii") as file:
            if file.read().strip() == forbids:
                return f"An administrator can allow it: sysctl {name}={allows}."
    return "In a container, add the capability SYS_ADMIN (docker run --cap-add SYS_ADMIN)."
