"""Holds one place in MPI's world: `mpirun` starts this file once per rank.

It hands the variables that mpirun gave it to the launcher, which starts the worker with them as a child of its own, as
any other worker; and it stays until the launcher lets go, because mpirun counts a rank as ended when this ends.

It runs without site-packages, so that it is there within milliseconds: only the standard library is imported.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def hold(path: str) -> None:
    """Tells the launcher this process's variables, and returns when the launcher closes the connection."""
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(path)
        launcher.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        launcher.recv(1)


if __name__ == "__main__":
    # Ctrl-C is the launcher's to pass on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hold(sys.argv[1])
