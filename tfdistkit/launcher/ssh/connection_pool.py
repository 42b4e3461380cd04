"""The connections to all hosts of a job: one thread serves them, and detects silent hosts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdistkit.launcher.spec import ProcessSpec
from tfdistkit.launcher.ssh.agent.protocol import Message
from tfdistkit.launcher.ssh.connection import SILENCE_S, Carrier, Connection, Question
from tfdistkit.launcher.ssh.workers import RemoteWorker

_POLL_S = 0.2
# A longer gap between two polls means that this process was itself suspended (Ctrl-Z).
_SUSPENDED_S = 3.0
# Silence longer than this is suspicious: agents answer a ping per second.
_SUSPICIOUS_SILENCE_S = 2.5
# Time to forward the last output.
_OUTPUT_S = 1.0
# Time for ssh to exit after its agent.
_END_S = 1.0
# Poll interval of `should_stop` in `wait_for`.
_WAIT_POLL_S = 0.1


class ConnectionPool(threading.Thread):
    """The connections to all hosts of a job, served by this thread until `close`."""

    def __init__(self) -> None:
        super().__init__(name="tfdistkit-hosts", daemon=True)
        self.connections: list[Connection] = []
        # Guards the connections and their workers; notified of every change.
        self._changed = threading.Condition()
        self._wake_reading, self._wake_writing = os.pipe()
        for descriptor in (self._wake_reading, self._wake_writing):
            os.set_blocking(descriptor, False)
        self._is_closed = False
        self._polled_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self._polled_at = time.monotonic()
            while not self._is_closed:
                self._poll_once()
        except Exception as error:
            # Without this thread, callers would wait for the hosts for ever.
            for one in self.connections:
                self.give_up(one, f"The launcher failed: {type(error).__name__}: {error}")
            raise

    def _poll_once(self) -> None:
        poller, readers = self._poller()
        ready = poller.poll(_POLL_S * 1000)
        with self._changed:
            now = time.monotonic()
            was_suspended = now - self._polled_at > _SUSPENDED_S
            self._polled_at = now
            for descriptor, _ in ready:
                if descriptor == self._wake_reading:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_reading, 4096)
                elif descriptor in readers:
                    readers[descriptor].read(descriptor)
            for one in self.connections:
                one.outbox.flush()
                one.poll(now, was_suspended=was_suspended)
            self._changed.notify_all()

    def add(self, connection: Connection) -> None:
        """Adds a connection."""
        with self._changed:
            self.connections.append(connection)
        self.wake()

    def watch(self) -> None:
        """Enables the timeout for silent hosts."""
        with self._changed:
            for one in self.connections:
                one.is_watched = True

    def pause(self) -> None:
        """Tells all agents that this process is about to be suspended; may be called from a signal handler."""
        with self._changed:
            for one in self.connections:
                one.is_paused = True
                one.send({"do": "pause"})
                one.outbox.flush()

    def resume(self) -> None:
        """Reverts `pause`."""
        with self._changed:
            for one in self.connections:
                one.is_paused = False
        self.wake()

    def ask(self, connection: Connection, what: str, **asked: Any) -> Question:
        """Sends a request to one host, without waiting for the answer.

        Args:
            connection: The host.
            what: The name of a request of `ssh.agent.main.Agent`.
            **asked: Its arguments.
        """
        with self._changed:
            question = connection.ask(what, **asked)
        self.wake()
        return question

    def start_worker(
        self, connection: Connection, spec: ProcessSpec, timeout_s: float, **asked: Any
    ) -> tuple[RemoteWorker, Question]:
        """Starts a worker, and waits until it runs.

        Args:
            connection: The host.
            spec: The worker.
            timeout_s: The timeout, in seconds.
            **asked: The arguments of the agent's `start`.
        """

        def send(message: Message) -> None:
            with self._changed:
                connection.send(message)
            self.wake()

        with self._changed:
            worker, question = connection.start(spec, send, **asked)
        self.wake()
        self.wait_for(lambda: question.is_done, timeout_s)
        worker.pid = question.answer or 0
        return worker, question

    def wait_for(
        self, condition: Callable[[], bool], timeout_s: float, should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Waits until a condition is true.

        Args:
            condition: A condition that changes only with messages of hosts.
            timeout_s: The timeout, in seconds.
            should_stop: Whether to stop waiting.

        Returns:
            Whether the condition is true.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0 or should_stop():
                    return False
                self._changed.wait(min(left, _WAIT_POLL_S))
            return True

    def wait_for_change(self, timeout_s: float) -> None:
        """Waits for the next change of any host, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait(timeout_s)

    def doubt_s(self) -> float:
        """Returns the seconds until a host that is silent now counts as lost; 0 if none is silent."""
        with self._changed:
            silent_s = max((one.silent_s for one in self.connections if not one.is_over), default=0.0)
        return SILENCE_S - silent_s + 2 * _POLL_S if silent_s > _SUSPICIOUS_SILENCE_S else 0.0

    def give_up(self, connection: Connection, why: str) -> None:
        """Marks a host as lost."""
        with self._changed:
            connection.give_up(why)

    def close(self, timeout_s: float) -> None:
        """Ends all agents, each with the remaining processes on its host; agents that do not answer are abandoned.

        Args:
            timeout_s: The timeout, in seconds.
        """
        if self._is_closed:
            return
        with self._changed:
            for one in self.connections:
                one.send({"do": "goodbye"})
        self.wake()
        self.wait_for(lambda: all(one.is_over or not one.is_up for one in self.connections), timeout_s)
        for one in self.connections:
            self.give_up(one, "The job is over.")
        # The last output is read, unless the console is blocked.
        self.wait_for(lambda: all(one.is_drained for one in self.connections), _OUTPUT_S)
        self._is_closed = True
        self.wake()
        self.join(timeout=5)
        for one in self.connections:
            one.close_streams()
            _hang_up(one.child)
        _end([one.child for one in self.connections])
        for descriptor in (self._wake_reading, self._wake_writing):
            os.close(descriptor)

    def wake(self) -> None:
        """Wakes the thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writing, b"!")

    def _poller(self) -> tuple[select.poll, dict[int, Connection]]:
        """Returns a poller of all descriptors to read from or write to, and the connection of each to read from."""
        poller = select.poll()
        poller.register(self._wake_reading, select.POLLIN)
        readers = {}
        with self._changed:
            for one in self.connections:
                for descriptor in one.sources:
                    readers[descriptor] = one
                    poller.register(descriptor, select.POLLIN)
                if not one.outbox.is_empty:
                    poller.register(one.outbox.descriptor, select.POLLOUT)
                for worker in one.workers.values():
                    for stream in worker.streams.values():
                        if not stream.is_closed and not stream.outbox.is_empty:
                            poller.register(stream.outbox.descriptor, select.POLLOUT)
        return poller, readers


def _hang_up(child: Carrier) -> None:
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _end(children: Sequence[Carrier]) -> None:
    """Ends all ssh processes in parallel: many hosts may be unreachable."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _END_S
        for child in children:
            if number is not None and child.poll() is None:
                child.send_signal(number)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        if all(child.poll() is not None for child in children):
            return
