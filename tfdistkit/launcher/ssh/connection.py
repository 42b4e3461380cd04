"""The connection to the agent of one host: its questions, its workers, and its loss."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Protocol

from tfdistkit.launcher.backend import Loss
from tfdistkit.launcher.spec import ProcessSpec
from tfdistkit.launcher.ssh.agent.protocol import GREETING, Decoder, Message, Outbox, ProtocolError, encode, read_now
from tfdistkit.launcher.ssh.workers import RemoteWorker

# Timeout for a silent agent, which answers a ping per second. The agent's own timeout is twice as long.
SILENCE_S = 10.0
_PING_S = 1.0
# Time for ssh to exit and to print the reason after the connection has ended.
_END_REASON_S = 1.0
# How much output of ssh or of a login shell is kept.
_MOST_SAID_BYTES = 4096


@dataclass
class Question:
    """A request to an agent, with its answer once `is_done`; or `error`, and the class of the error as `kind`."""

    is_done: bool = False
    answer: Any = None
    error: str | None = None
    kind: str = ""
    answered_at: float = 0.0


class Carrier(Protocol):
    """What carries bytes to and from an agent: an ssh process (`subprocess.Popen`), or another with these members."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal."""


class Connection:
    """The connection to the agent of one host. Not thread-safe: its owner holds a lock around each call.

    Args:
        host: The user's name for the host.
        child: What carries bytes to a Python on the host, which reads `first_line` and becomes the agent.
        first_line: The source of the agent.
    """

    # What a lost worker was lost with, before the name of its host.
    lost_with = "its host"

    def __init__(self, host: str, child: Carrier, first_line: bytes):
        self.host = host
        self.child = child
        assert self.child.stdin is not None and self.child.stdout is not None and self.child.stderr is not None
        self.outbox = Outbox(self.child.stdin.fileno())
        self.outbox.put(first_line)
        # Descriptors to read from: the agent's messages, and the stderr of ssh.
        self.sources = {self.child.stdout.fileno(): self._listen, self.child.stderr.fileno(): self._note}
        for descriptor in self.sources:
            os.set_blocking(descriptor, False)
        self.said = b""
        self.loss: Loss | None = None
        self.is_up = self.has_left = self.is_watched = self.is_paused = False
        self.clock_s = 0.0
        self.workers: dict[int, RemoteWorker] = {}
        self._decoder = Decoder()
        self._greeting = b""
        self._questions: dict[int, Question] = {}
        self._ended_at: float | None = None
        self._heard_at, self._heard_time = time.monotonic(), time.time()
        self._pinged_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the connection is lost or closed."""
        return self.loss is not None or self.has_left

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the agent."""
        return time.monotonic() - self._heard_at

    def send(self, message: Message) -> None:
        """Queues a message for the agent."""
        if not self.is_over:
            self.outbox.put(encode(message))

    def ask(self, what: str, **asked: Any) -> Question:
        """Sends a request to the agent; see `ssh.agent.main.Agent`."""
        question = Question()
        if self.loss is not None:
            question.is_done, question.error = True, self.loss.text
            return question
        self._questions[number := len(self._questions)] = question
        self.send({"do": "ask", "number": number, "what": what, "with": asked})
        return question

    def start(self, spec: ProcessSpec, send: Callable[[Message], None], **asked: Any) -> tuple[RemoteWorker, Question]:
        """Requests the start of a worker; the answer is its process id.

        Args:
            spec: The worker.
            send: Sends messages for the worker's handle, taking the lock.
            **asked: The arguments of the agent's `start`.
        """
        worker = RemoteWorker(spec, len(self.workers), send)
        self.workers[worker.number] = worker
        name = f"{worker.number}.{spec.name.folder}"
        question = self.ask("start", worker=worker.number, name=name, **asked)
        if self.loss is not None:
            worker.lose(self.loss)
        return worker, question

    def read(self, descriptor: int) -> None:
        """Reads the available bytes of one of the `sources`."""
        data = read_now(descriptor)
        if data is None:
            return
        take = self.sources[descriptor] if data else self.sources.pop(descriptor)
        take(data)

    def poll(self, now: float, was_suspended: bool) -> None:
        """Forwards the workers' output, pings the agent, and detects a lost host.

        Args:
            now: The time, by `time.monotonic`.
            was_suspended: Whether this process was itself suspended, so that the silence means nothing.
        """
        for worker in self.workers.values():
            for stream in worker.streams.values():
                message = stream.flush()
                if message is not None:
                    self.send(message)
            request = worker.request()
            if request is not None:
                self.send(request)
        if self.is_over:
            return
        if self._ended_at is not None and (self.child.poll() is not None or now - self._ended_at > _END_REASON_S):
            self._lose(self._end_reason())
            return
        if not self.is_up:
            return
        if was_suspended:
            self._heard_at = now
        if self.is_watched and now - self._heard_at > SILENCE_S:
            self._lose(f"{self.host} has not answered for {SILENCE_S:g} s: it is off, stopped or cut off.")
        elif now - self._pinged_at >= _PING_S and not self.is_paused:
            self._pinged_at = now
            self.send({"do": "ping"})
        self.outbox.flush()

    @property
    def is_drained(self) -> bool:
        """Whether all output of the workers was forwarded."""
        return all(stream.is_closed for worker in self.workers.values() for stream in worker.streams.values())

    def close_streams(self) -> None:
        """Closes all streams, dropping output that was not forwarded."""
        for worker in self.workers.values():
            for stream in worker.streams.values():
                stream.close()

    def give_up(self, why: str) -> None:
        """Marks the host as lost, unless the connection is over already."""
        if not self.is_over:
            self._lose(why)

    def _listen(self, data: bytes) -> None:
        self._heard_at, self._heard_time = time.monotonic(), time.time()
        if not data:
            self._ended_at = self._heard_at
            return
        if self.is_over:
            return  # the loss was already reported
        if not self.is_up:
            noise, found, data = (self._greeting + data).partition(GREETING)
            self._greeting = noise[-_MOST_SAID_BYTES:]
            if not found:
                return
            self.is_up = True
        try:
            for message, payload in self._decoder.push(data):
                self._take(message, payload)
        except ProtocolError as error:
            self._lose(f"{self.host} sent a message that is not the agent's: {error}.")

    def _note(self, data: bytes) -> None:
        self.said = (self.said + data)[-_MOST_SAID_BYTES:]

    def _take(self, message: Message, payload: bytes) -> None:
        what = message["is"]
        if what == "answer":
            question = self._questions[message["to"]]
            question.answer, question.error = message.get("answer"), message.get("error")
            question.kind, question.answered_at = message.get("type", ""), time.monotonic()
            question.is_done = True
        elif what == "goodbye":
            self.has_left = True
            self._release(None)
        elif what != "pong":
            self.workers[message["worker"]].take(message, payload, self.clock_s)

    def _end_reason(self) -> str:
        code = self.child.poll()
        said = [line.strip() for line in (self.said + self._greeting).decode(errors="replace").splitlines()]
        reason = "; ".join(line for line in said[-5:] if line)
        what = "The connection ended" if self.is_up else "The connection failed"
        return f"{what}: {reason or 'no reason was given'} (exit code {code})."

    def _lose(self, why: str) -> None:
        self.loss = Loss(why, self._heard_time, self.lost_with)
        self._release(self.loss)

    def _release(self, loss: Loss | None) -> None:
        for worker in self.workers.values():
            worker.lose(loss)
        for question in self._questions.values():
            if not question.is_done:
                question.is_done, question.error = True, loss.text if loss else "The agent has left."
