"""All hosts of a job: one thread carries everything between the launcher and the agents, and sees who falls silent."""

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
from tfdistkit.launcher.ssh.connection import SILENCE_S, Connection, Question
from tfdistkit.launcher.ssh.workers import RemoteWorker

_POLL_S = 0.2
# This process was held up itself (Ctrl-Z): what it has not heard meanwhile says nothing.
_HELD_UP_S = 3.0
# Silence that is no accident.
_ODD_SILENCE_S = 2.5
# How long the last output may take to come out.
_OUTPUT_S = 1.0
# How long ssh may take to end when its agent has.
_END_S = 1.0
# What a caller looks up from waiting for.
_GLANCE_S = 0.1


class ConnectionPool(threading.Thread):
    """The connections to all hosts of a job, from now until `close`."""

    def __init__(self) -> None:
        super().__init__(name="tfdistkit-hosts", daemon=True)
        self.connections: list[Connection] = []
        # Guards the connections and all that belongs to them; told of every change.
        self._changed = threading.Condition()
        self._wake_reading, self._wake_writing = os.pipe()
        for descriptor in (self._wake_reading, self._wake_writing):
            os.set_blocking(descriptor, False)
        self._is_closed = False
        self._looked_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self._looked_at = time.monotonic()
            while not self._is_closed:
                self._turn()
        except Exception as error:
            # Nobody would hear of the hosts any more, and everybody would wait for them.
            for one in self.connections:
                self.give_up(one, f"The launcher failed: {type(error).__name__}: {error}")
            raise

    def _turn(self) -> None:
        poller, readers = self._poller()
        ready = poller.poll(_POLL_S * 1000)
        with self._changed:
            now = time.monotonic()
            held_up = now - self._looked_at > _HELD_UP_S
            self._looked_at = now
            for descriptor, _ in ready:
                if descriptor == self._wake_reading:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_reading, 4096)
                elif descriptor in readers:
                    readers[descriptor].read(descriptor)
            for one in self.connections:
                one.outbox.flush()
                one.look(now, forgive=held_up)
            self._changed.notify_all()

    def add(self, connection: Connection) -> None:
        """Takes over a connection."""
        with self._changed:
            self.connections.append(connection)
        self.wake()

    def watch(self) -> None:
        """From now on, a host that is silent for too long counts as lost."""
        with self._changed:
            for one in self.connections:
                one.is_watched = True

    def pause(self) -> None:
        """Tells all hosts that this process is about to be suspended; also from a handler of signals."""
        with self._changed:
            for one in self.connections:
                one.is_paused = True
                one.send({"do": "pause"})
                one.outbox.flush()

    def resume(self) -> None:
        """Takes `pause` back."""
        with self._changed:
            for one in self.connections:
                one.is_paused = False
        self.wake()

    def ask(self, connection: Connection, what: str, **asked: Any) -> Question:
        """Asks one host for something, and does not wait.

        Args:
            connection: The host.
            what: One of what `remote_agent.Agent` answers.
            **asked: What belongs to it.
        """
        with self._changed:
            question = connection.ask(what, **asked)
        self.wake()
        return question

    def start_worker(
        self, connection: Connection, spec: ProcessSpec, timeout_s: float, **asked: Any
    ) -> tuple[RemoteWorker, Question]:
        """Starts a worker, and waits until it is there.

        Args:
            connection: The host.
            spec: The worker.
            timeout_s: How long that may take, in seconds.
            **asked: What `remote_agent.Agent` wants to know.
        """

        def tell(message: Message) -> None:
            with self._changed:
                connection.send(message)
            self.wake()

        with self._changed:
            worker, question = connection.start(spec, tell, **asked)
        self.wake()
        self.wait_for(lambda: question.is_done, timeout_s)
        worker.pid = question.answer or 0
        return worker, question

    def wait_for(
        self, condition: Callable[[], bool], timeout_s: float, should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Waits until something is true.

        Args:
            condition: It can only become true by what a host does.
            timeout_s: For how long, in seconds.
            should_stop: Whether to stop waiting.

        Returns:
            Whether it is true.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0 or should_stop():
                    return False
                self._changed.wait(min(left, _GLANCE_S))
            return True

    def wait_for_change(self, timeout_s: float) -> None:
        """Returns when a host did anything, or after `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def doubt_s(self) -> float:
        """Returns after how many seconds a host that is silent now will count as lost; 0 if none is silent."""
        with self._changed:
            silent_s = max((one.silent_s for one in self.connections if not one.is_over), default=0.0)
        return SILENCE_S - silent_s + 2 * _POLL_S if silent_s > _ODD_SILENCE_S else 0.0

    def give_up(self, connection: Connection, why: str) -> None:
        """Counts a host as lost."""
        with self._changed:
            connection.give_up(why)

    def close(self, timeout_s: float) -> None:
        """Says goodbye: each agent ends what is left on its host; those that do not answer are left to themselves.

        Args:
            timeout_s: How long that may take, in seconds.
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
        # Somebody reads it, unless the console is blocked.
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
        """Lets the thread look at what is new."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writing, b"!")

    def _poller(self) -> tuple[select.poll, dict[int, Connection]]:
        """Everything that something can come from, or that waits to be written to."""
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


def _hang_up(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """All at the same time: there can be many hosts that do not answer any more."""
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
