"""Finds folders that do not answer, as those of a dead NFS server, before the launcher touches them.

A process that touches such a folder may hang where no signal reaches it. So a child touches it, with a deadline.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tfdistkit import env
from tfdistkit.errors import explain

# A server that is slow to wake up a disk answers within seconds.
_TIMEOUT_S = 10.0
_POLL_S = 0.01
# File systems that a server or another process serves; without one of them, nothing is looked at.
_REMOTE = re.compile(r"nfs\d?|cifs|smb3|fuse|fuse\..*|lustre|ceph|gpfs|beegfs|glusterfs|9p|afs|pvfs2|virtiofs")
# `statvfs`, because the kernel answers others from its cache.
_LOOK = """
import os, sys
path = sys.argv[1]
while not os.path.exists(path) and path != "/":
    path = os.path.dirname(path)
os.statvfs(path)
"""


def silent_folder(paths: Mapping[str, str | Path | None], timeout_s: float = _TIMEOUT_S) -> str | None:
    """Returns an error message for the first path that does not answer, or for TMPDIR; None if all do.

    Args:
        paths: What each is to the user (`--log-dir`), and the path, which need not exist.
        timeout_s: How long to wait, in seconds.
    """
    mounts = _remote_mounts()
    if not mounts:
        return None
    used = {**paths, "TMPDIR": env.text("TMPDIR")}
    absolute = {name: os.path.abspath(path) for name, path in used.items() if path}
    looks = {name: _look_at(path) for name, path in absolute.items()}
    deadline = time.monotonic() + timeout_s
    while any(one.poll() is None for one in looks.values()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    silent = [name for name, one in looks.items() if one.poll() is None]
    for name in silent:
        looks[name].kill()  # It may end only when the server answers, so there is no wait for it.
    if not silent:
        return None
    path = absolute[silent[0]]
    inside = [mount for mount in mounts if os.path.commonpath([mount, path]) == mount]
    where = f", on the {mounts[max(inside, key=len)]} at {max(inside, key=len)}" if inside else ""
    return explain(
        f"{silent[0]} must be on a disk that answers.",
        received=f"{path}{where}: no answer within {timeout_s:g} s",
        do="Look whether its server is alive (`stat -f` on it hangs, too), or use a folder on another disk.",
    )


def _look_at(path: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LOOK, path],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _remote_mounts() -> dict[str, str]:
    """Returns where file systems are mounted that may not answer, and their types; see proc_pid_mountinfo(5)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return {}
    mounts = {}
    for line in lines:
        before, _, after = line.partition(" - ")
        kind = after.partition(" ")[0]
        if _REMOTE.fullmatch(kind):
            # Spaces and line breaks are written as octal numbers.
            mounts[re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), before.split()[4])] = kind
    return mounts
