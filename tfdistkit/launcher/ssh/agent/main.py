"""The launcher's agent on a host: starts workers, relays their output, and ends them with the connection.

The launcher sends this module and those that it imports over the connection, and a Python on the host runs them: no
installation is needed, and the version is always the launcher's. The agent communicates over stdin and stdout (see
`protocol`). When the connection ends, or the launcher is silent for too long, it sends the workers SIGTERM, waits, and
kills those that are left. If the agent itself is killed, a watchdog that it forked kills them.

It runs without site-packages: imports only the standard library and sent modules.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfdistkit import env
from tfdistkit.launcher.local import watchdog
from tfdistkit.launcher.ssh.agent import host_info, links
from tfdistkit.launcher.ssh.agent.children import Stream, Worker, start_watchdog
from tfdistkit.launcher.ssh.agent.protocol import (
    GREETING,
    WINDOW_BYTES,
    Decoder,
    Message,
    Outbox,
    ProtocolError,
    encode,
    read_now,
)

if TYPE_CHECKING:
    from tfdistkit.cluster.rendezvous.gloo_store import GlooStore

# Timeout for a silent launcher, which sends a ping per second.
SILENCE_S = 20.0
# Time for workers to end after SIGTERM, as in `supervise.stopping`.
_GRACE_S = 5.0
# Time to send the last output and the goodbye.
_FAREWELL_S = 2.0
# Poll interval for workers that ended, were suspended, or wrote a crash record.
_POLL_S = 0.05
_IDLE_S = 0.5


class Agent:
    """The agent of one host.

    Args:
        mark: `NAME=value`, which is set in the environment of all processes of the job on this host.
    """

    def __init__(self, mark: str):
        self._mark = mark
        self._folder = tempfile.mkdtemp(prefix="tfdistkit-")
        self._watchdog, self._watchdog_pid = start_watchdog(mark, self._folder)
        self._decoder, self._outbox = Decoder(), Outbox(1)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, Worker] = {}
        self._streams: dict[tuple[int, str], Stream] = {}
        self._ports = host_info.HeldPorts()
        self._link = links.LinkServer()
        self._store: GlooStore | None = None
        self._heard_at = time.monotonic()
        self._is_over = self._is_dismissed = self._is_paused = False
        self._answers: dict[str, Callable[..., Any]] = {
            "describe": host_info.describe_host,
            "inspect_environment": self._inspect_environment,
            "own_address": host_info.own_address_towards,
            "connect": lambda addresses, timeout_s: host_info.connect_to(list(map(tuple, addresses)), timeout_s),
            "hold_ports": self._ports.hold,
            "release_ports": self._ports.release,
            "open_link": self._link.open,
            "serve_link": self._link.serve,
            "measure_link": links.measure_link,
            "serve_store": self._serve_store,
            "start": self._start,
        }

    def serve(self) -> None:
        """Serves the launcher's requests until it says goodbye or is lost, then ends all processes of the job."""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, self._listen)
        self._outbox.put(GREETING)
        try:
            while not self._is_over:
                self._poll_once()
        finally:
            self._leave()

    def _poll_once(self) -> None:
        self._want_to_write(not self._outbox.is_empty)
        running = any(not worker.is_gone for worker in self._workers.values())
        for key, _ in self._selector.select(_POLL_S if running else _IDLE_S):
            key.data()
        for worker in self._workers.values():
            for message in worker.poll():
                self._outbox.put(message)
        self._outbox.flush()
        silent_s = time.monotonic() - self._heard_at
        if self._outbox.is_broken or (silent_s > SILENCE_S and not self._is_paused):
            self._is_over = True

    def _want_to_write(self, wanted: bool) -> None:
        is_registered = 1 in self._selector.get_map()
        if wanted and not is_registered:
            self._selector.register(1, selectors.EVENT_WRITE, self._outbox.flush)
        elif is_registered and not wanted:
            self._selector.unregister(1)

    def _listen(self) -> None:
        data = read_now(0)
        if data is None:
            return
        self._heard_at = time.monotonic()
        if not data:
            self._is_over = True
            return
        try:
            for message, _ in self._decoder.push(data):
                self._take(message)
        except ProtocolError:
            self._is_over = True

    def _take(self, message: Message) -> None:
        what = message["do"]
        if what == "pause":
            self._is_paused = True
        elif what == "ask":
            self._outbox.put(encode({"is": "answer", "to": message["number"], **self._answer(message)}))
        elif what == "ping":
            self._is_paused = False
            self._outbox.put(encode({"is": "pong"}))
        elif what == "signal":
            self._workers[message["worker"]].send_signal(message["signal"])
        elif what == "stacks":
            if message["worker"] in self._workers:  # It may not have started.
                self._workers[message["worker"]].progress.ask()
        elif what == "took":
            self._give_credit(message["worker"], message["channel"], message["bytes"])
        elif what == "goodbye":
            self._is_over = self._is_dismissed = True

    def _answer(self, message: Message) -> Message:
        try:
            return {"answer": self._answers[message["what"]](**message["with"])}
        except Exception as error:  # every error is reported to the launcher
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return {"error": text or type(error).__name__, "type": type(error).__name__}

    def _inspect_environment(self, variables: dict[str, str | None], **asked: Any) -> dict[str, Any]:
        return host_info.inspect_environment(variables=env.child_env(variables), **asked)

    def _serve_store(self, world_size: int, address: str, secret: str) -> int:
        # Imported on first use: loading its HTTP server takes 0.1 s.
        from tfdistkit.cluster.rendezvous.gloo_store import GlooStore

        self._store = GlooStore(world_size, host=address, secret=secret)
        return self._store.address[1]

    def _start(
        self, worker: int, name: str, command: list[str], folder: str, variables: dict[str, str | None], record: str
    ) -> int:
        """Starts a worker and returns its process id; `record` is the file name of its crash record."""
        own = os.path.join(self._folder, name)
        os.makedirs(own, exist_ok=True)
        added = {env.RUN_DIR: self._folder, env.TASK_DIR: own, env.PARENT_PID: str(os.getpid()), "PWD": folder}
        name_of_mark, _, value = self._mark.partition("=")
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=env.child_env({**variables, **added, name_of_mark: value}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        os.write(self._watchdog, b"+%d\n" % child.pid)
        self._workers[worker] = Worker(worker, child, os.path.join(own, record))
        for channel, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            assert pipe is not None
            stream = self._streams[worker, channel] = Stream(worker, channel, pipe.fileno())
            self._read_on(stream)
        return child.pid

    def _read_on(self, stream: Stream) -> None:
        self._selector.register(stream.descriptor, selectors.EVENT_READ, lambda: self._carry(stream))

    def _carry(self, stream: Stream) -> None:
        data = read_now(stream.descriptor)
        if data is None:
            return
        place = {"worker": stream.worker, "channel": stream.channel}
        if not data:
            self._selector.unregister(stream.descriptor)
            del self._streams[stream.worker, stream.channel]
            self._outbox.put(encode({"is": "closed", **place}))
            return
        self._outbox.put(encode({"is": "output", **place}, data))
        stream.in_flight_bytes += len(data)
        if stream.in_flight_bytes >= WINDOW_BYTES:
            self._selector.unregister(stream.descriptor)

    def _give_credit(self, worker: int, channel: str, count: int) -> None:
        stream = self._streams.get((worker, channel))
        if stream is not None:
            was_full = stream.in_flight_bytes >= WINDOW_BYTES
            stream.in_flight_bytes -= count
            if was_full and stream.in_flight_bytes < WINDOW_BYTES:
                self._read_on(stream)

    def _leave(self) -> None:
        """Ends all processes of the job on this host, and removes its files."""
        if not self._is_dismissed:
            self._ask_to_end()
        watchdog.kill_all([worker.pid for worker in self._workers.values() if not worker.is_gone], self._mark)
        if self._is_dismissed:
            self._say_goodbye()
        for worker in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.child.wait(timeout=1)
        if self._store is not None:
            self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._watchdog)
        os.waitpid(self._watchdog_pid, 0)

    def _ask_to_end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGCONT):
            for worker in self._workers.values():
                if not worker.is_gone:
                    worker.send_signal(number)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(not worker.is_gone for worker in self._workers.values()):
            for worker in self._workers.values():
                list(worker.poll())
            for stream in list(self._streams.values()):
                read_now(stream.descriptor)  # a worker must not block on its last output
            time.sleep(_POLL_S)

    def _say_goodbye(self) -> None:
        """Sends the last output, then the goodbye."""
        deadline = time.monotonic() + _FAREWELL_S
        for worker in self._workers.values():
            for message in worker.poll():
                self._outbox.put(message)
        for stream in list(self._streams.values()):
            while data := read_now(stream.descriptor):
                self._outbox.put(encode({"is": "output", "worker": stream.worker, "channel": stream.channel}, data))
        self._outbox.put(encode({"is": "goodbye"}))
        while not self._outbox.is_empty and time.monotonic() < deadline:
            self._outbox.flush()
            time.sleep(0.005)


def run(mark: str) -> None:
    """Runs the agent of a host until the job is over.

    Args:
        mark: See `Agent`.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        # A no-op handler, not SIG_IGN: workers would inherit that.
        signal.signal(number, lambda number, frame: None)
    Agent(mark).serve()
