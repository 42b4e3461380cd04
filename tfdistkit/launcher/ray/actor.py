"""The actor of one worker: starts the agent that runs the worker, and carries bytes between it and the driver.

Ray gets this class by value, so a node needs no tfdistkit to say that it lacks one.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ray

# How long `read` waits for bytes.
_READ_S = 5.0
# Ray keeps results below 100 KiB out of its object store.
_READ_BYTES = 65_536


class AgentActor:
    """Runs the agent of one worker (see `ssh.agent.main`) as a child of its actor."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], removed: Sequence[str]) -> dict[str, Any]:
        """Starts the agent.

        Args:
            command: The arguments of Python.
            removed: The variables of this actor that the agent does not get.

        Returns:
            The facts about this node.
        """
        # A script that calls `ray.init()` itself joins this cluster.
        address = ray.get_runtime_context().gcs_address
        variables = {**os.environ, "RAY_ADDRESS": address}
        for name in removed:
            variables.pop(name, None)
        # Ray blocks SIGINT in its threads. A child inherits that, and would not end by Ctrl-C.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            self._child = subprocess.Popen(
                [sys.executable, *command],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()
        return {"host": os.uname().nodename, "address": address, "node": node, "pid": os.getpid()}

    def write(self, data: bytes) -> None:
        """Writes bytes to the agent; does nothing when it is gone, which `read` tells."""
        assert self._child is not None and self._child.stdin is not None
        try:
            while data:
                data = data[os.write(self._child.stdin.fileno(), data) :]
        except OSError:
            pass

    def read(self) -> tuple[bytes, bytes, bool]:
        """Returns what the agent wrote to stdout and stderr, and whether it has closed stdout; waits a while for it."""
        assert self._child is not None and self._child.stdout is not None and self._child.stderr is not None
        out, errors = self._child.stdout.fileno(), self._child.stderr.fileno()
        ready, _, _ = select.select([out, errors], [], [], _READ_S)
        said = os.read(errors, _READ_BYTES) if errors in ready else b""
        data = os.read(out, _READ_BYTES) if out in ready else b""
        if errors in ready and not said and out not in ready:
            # Its stderr alone is at its end: wait for the rest without spinning.
            ready, _, _ = select.select([out], [], [], _READ_S)
            data = os.read(out, _READ_BYTES) if ready else b""
        return data, said, bool(ready) and out in ready and not data
