"""A stand-in for a dead NFS server: a file system in user space (FUSE) that never answers reads and writes.

The files `train.csv` and new ones can be opened, as from a cache. As a program (`dead_disk.py FOLDER DEAD`) it mounts
itself, and serves until its stdin closes; then every waiting call fails with ENOTCONN. A process with a call that FUSE
has taken cannot be killed, which is worse than NFS, whose waits end at SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
# Of <linux/fuse.h>.
_HEADER, _ANSWER = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
_LOOKUP, _GETATTR, _SETATTR, _MKDIR, _UNLINK, _OPEN, _READ, _WRITE, _STATFS = 1, 3, 4, 9, 10, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _CREATE = 18, 20, 25, 26, 27, 28, 29, 35
_NO_ANSWER = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
_FILE_BYTES = 1 << 20

# What is dead: the data of files, or everything below the root.
DATA, NAMES = "data", "names"


def why_no_fuse() -> str:
    """Returns why this machine cannot mount the file system; empty if it can."""
    if os.geteuid():
        return "only root may mount it"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return ""


@contextlib.contextmanager
def dead_disk(folder: Path, dead: str = DATA) -> Iterator[Path]:
    """Mounts the file system, and unmounts it in the end.

    Args:
        folder: Where; it is created.
        dead: `DATA` or `NAMES`.
    """
    folder.mkdir()
    words = [sys.executable, "-I", "-S", __file__, str(folder), dead]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None and server.stdout is not None
    try:
        assert server.stdout.readline() == b"mounted\n"
        yield folder
    finally:
        server.kill()  # The kernel ends all waiting calls when /dev/fuse closes.
        server.communicate()
        _LIBC.umount2(os.fsencode(folder), _MNT_DETACH)


class _Server:
    """Answers the kernel.

    Args:
        device: The opened /dev/fuse.
        dead: `DATA` or `NAMES`.
    """

    def __init__(self, device: int, dead: str):
        self._device, self._dead = device, dead
        self._names: dict[tuple[int, str], int] = {(1, "train.csv"): 2}
        self._folders = {1}

    def run(self) -> None:
        while 0 not in (ready := select.select([self._device, 0], [], [])[0]):
            if self._device in ready:
                self._take(os.read(self._device, 1 << 20))

    def _take(self, request: bytes) -> None:
        _, operation, unique, node, *_ = _HEADER.unpack_from(request)
        body = request[_HEADER.size :]
        if operation in _NO_ANSWER or operation in (_READ, _WRITE) or (operation == _LOOKUP and self._dead == NAMES):
            return
        answer = self._answer(operation, node, body)
        number, data = (-answer, b"") if isinstance(answer, int) else (0, answer)
        with contextlib.suppress(OSError):  # The caller was killed meanwhile.
            os.write(self._device, _ANSWER.pack(_ANSWER.size + len(data), number, unique) + data)

    def _answer(self, operation: int, node: int, body: bytes) -> bytes | int:
        """Returns the answer, or the number of an error."""
        if operation == _INIT:
            major, minor, read_ahead, _ = struct.unpack_from("=IIII", body)
            return struct.pack("=IIIIHHIIHHI28x", major, min(minor, 31), read_ahead, 0, 16, 12, 1 << 17, 1, 0, 0, 0)
        if operation == _LOOKUP:
            found = self._names.get((node, body.rstrip(b"\0").decode()))
            return errno.ENOENT if found is None else self._entry(found)
        if operation in (_GETATTR, _SETATTR):
            return struct.pack("=QII", 3600, 0, 0) + self._attributes(node)
        if operation in (_MKDIR, _CREATE):
            name = body[8 if operation == _MKDIR else 16 :].rstrip(b"\0").decode()
            made = self._names.setdefault((node, name), 2 + len(self._names))
            if operation == _MKDIR:
                self._folders.add(made)
            return self._entry(made) + (bytes(16) if operation == _CREATE else b"")
        if operation == _STATFS:
            return struct.pack("=QQQQQIII28x", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096)
        if operation in (_OPEN, _OPENDIR):
            return bytes(16)
        return b"" if operation in (_RELEASE, _FSYNC, _FLUSH, _RELEASEDIR, _READDIR, _UNLINK) else errno.ENOSYS

    def _entry(self, node: int) -> bytes:
        return struct.pack("=QQQQII", node, 0, 3600, 3600, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        is_folder = node in self._folders
        mode = (stat.S_IFDIR | 0o755) if is_folder else (stat.S_IFREG | 0o644)
        size = 0 if is_folder or node > 2 else _FILE_BYTES
        return struct.pack("=QQQQQQIIIIIIIIII", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def main(folder: str, dead: str) -> None:
    """Mounts the file system, and serves until stdin closes."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _LIBC.mount(b"dead", os.fsencode(folder), b"fuse", 0, options):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    _Server(device, dead).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
