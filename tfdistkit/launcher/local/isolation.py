"""A network of its own for a job on one machine: a network namespace with nothing in it but loopback.

TensorFlow's servers listen on all interfaces, and ask for no credentials. In a namespace of its own there is no
interface by which anybody else could come. This process enters it before it starts anything: the launcher, what it
serves to the workers, and all workers are in there together. The kernel removes the namespace with the last of them.
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
# `struct ifreq`: the name, what is asked for or set, and space that is not used here.
_REQUEST = struct.Struct("16sh22x")
_ADDRESS_REQUEST = struct.Struct("16sHxx4s16x")
_LOOPBACK = b"lo"

_FIREWALL = "Or leave out --isolate, and let a firewall close this machine's ports to others."
# Settings that forbid it, with the value that does, and one that does not; they exist only on systems that know them.
_SWITCHES = (
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user.max_user_namespaces", "0", "10000"),
    ("user.max_net_namespaces", "0", "10000"),
)
# What the kernel means by it.
_TOLD = {
    errno.EPERM: "Operation not permitted",
    errno.ENOSPC: "there are as many namespaces as the system allows",
    errno.EINVAL: "this kernel has none, or this process has more than one thread",
}


def isolate() -> None:
    """Moves this process, and all that it starts from now on, into a network namespace of its own.

    This process must have one thread only. Root stays root. Another user keeps the own id, in a user namespace that has
    no other: files belong to the user as before, and programs that become root (`sudo`) no longer can.

    Raises:
        UnsupportedError: if this system does not do that for this user.
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
                "--isolate cannot be had here: the system refuses a network namespace.",
                received=f"{_TOLD.get(error.errno or 0, str(error))}, as user {user}",
                do=f"{_advice()} {_FIREWALL}",
            )
        ) from error


def _unshare(flags: int) -> None:
    # `os.unshare` came with Python 3.12.
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _map_own_ids(user: int, group: int) -> None:
    """A new user namespace has no ids until they are mapped, each to itself."""
    with contextlib.suppress(FileNotFoundError):  # before Linux 3.19
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    # Not buffered: the kernel takes a map in one piece, and says at once what it thinks of it.
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _own_addresses() -> list[str]:
    """The IPv4 addresses that this machine's own name stands for: Gloo binds to them, whatever interface it is told."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [address for address in dict.fromkeys(str(one[4][0]) for one in found) if not address.startswith("127.")]


def _raise_loopback(own_addresses: Sequence[str]) -> None:
    """With the interface come its addresses, 127.0.0.1 and ::1; those of the outside stand for the same in here."""
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
    return "In a container it takes the capability SYS_ADMIN (docker run --cap-add SYS_ADMIN)."
