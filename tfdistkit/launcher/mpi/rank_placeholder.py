"""Hold one rank in MPI's world: `mpirun` starts this file once per rank.

It sends the variables that mpirun set to the launcher, which starts the worker with them as its own child. It exits
only when the launcher releases it, because mpirun counts a rank as ended when its placeholder ends.

It runs without site-packages, to start within milliseconds: imports only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def hold(path: str) -> None:
    """Sends this process's variables to the launcher, and returns when the launcher closes the connection."""
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(path)
        launcher.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        launcher.recv(1)


if __name__ == "__main__":
    # The launcher handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hold(sys.argv[1])
