"""One host of a job: the connection to its agent, what was asked and told over it, and how it was lost."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdistkit.launcher.backend import Loss
from tfdistkit.launcher.spec import ProcessSpec
from tfdistkit.launcher.ssh.agent.protocol import GREETING, Decoder, Message, Outbox, ProtocolError, encode, read_now
from tfdistkit.launcher.ssh.workers import RemoteWorker

# An agent says something every second. It ends its workers when it hears nothing for twice as long as this.
SILENCE_S = 10.0
_PING_S = 1.0
# ssh ends a moment after its last byte, and says why.
_LAST_WORDS_S = 1.0
# How much of what ssh, or a login shell, says is kept.
_MOST_SAID_BYTES = 4096


@dataclass
class Question:
    """What an agent was asked, and its answer once `is_done`; `error` tells why there is none, `kind` its class."""

    is_done: bool = False
    answer: Any = None
    error: str | None = None
    kind: str = ""
    answered_at: float = 0.0


class Connection:
    """The way to the agent of one host. Its owner calls all of it under one lock.

    Args:
        host: What the user calls the host.
        command: What leads to a Python there that reads `first_line`, and is the agent then.
        first_line: The agent.
        variables: The environment of the command.
    """

    def __init__(self, host: str, command: Sequence[str], first_line: bytes, variables: Mapping[str, str]):
        self.host = host
        self.child = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self.child.stdin is not None and self.child.stdout is not None and self.child.stderr is not None
        self.outbox = Outbox(self.child.stdin.fileno())
        self.outbox.put(first_line)
        # What is still to be read: the agent's messages, and what ssh itself says.
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
        """Whether nothing more will come."""
        return self.loss is not None or self.has_left

    @property
    def silent_s(self) -> float:
        """For how many seconds nothing has been heard of it."""
        return time.monotonic() - self._heard_at

    def send(self, message: Message) -> None:
        """Sends a message, as soon as the other side takes it."""
        if not self.is_over:
            self.outbox.put(encode(message))

    def ask(self, what: str, **asked: Any) -> Question:
        """Asks the agent for something; see `remote_agent.Agent`."""
        question = Question()
        if self.loss is not None:
            question.is_done, question.error = True, self.loss.text
            return question
        self._questions[number := len(self._questions)] = question
        self.send({"do": "ask", "number": number, "what": what, "with": asked})
        return question

    def start(self, spec: ProcessSpec, tell: Callable[[Message], None], **asked: Any) -> tuple[RemoteWorker, Question]:
        """Starts a worker; its process is the answer.

        Args:
            spec: The worker.
            tell: How the worker's handle, which knows no lock, sends messages.
            **asked: What its agent wants to know.
        """
        worker = RemoteWorker(spec, len(self.workers), tell)
        self.workers[worker.number] = worker
        name = f"{worker.number}.{spec.name.folder}"
        question = self.ask("start", worker=worker.number, name=name, **asked)
        if self.loss is not None:
            worker.lose(self.loss)
        return worker, question

    def read(self, descriptor: int) -> None:
        """Reads what one of the `sources` has now."""
        data = read_now(descriptor)
        if data is None:
            return
        take = self.sources[descriptor] if data else self.sources.pop(descriptor)
        take(data)

    def look(self, now: float, forgive: bool) -> None:
        """Lets out what the workers printed, says that the launcher is there, and sees whether the host is.

        Args:
            now: By `time.monotonic`.
            forgive: Whether this process was held up itself, and could not hear anybody.
        """
        for worker in self.workers.values():
            for stream in worker.streams.values():
                told = stream.flush()
                if told is not None:
                    self.send(told)
        if self.is_over:
            return
        if self._ended_at is not None and (self.child.poll() is not None or now - self._ended_at > _LAST_WORDS_S):
            self._lose(self._last_words())
            return
        if not self.is_up:
            return
        if forgive:
            self._heard_at = now
        if self.is_watched and now - self._heard_at > SILENCE_S:
            self._lose(f"{self.host} has not answered for {SILENCE_S:g} s: it is off, stopped or cut off.")
        elif now - self._pinged_at >= _PING_S and not self.is_paused:
            self._pinged_at = now
            self.send({"do": "ping"})
        self.outbox.flush()

    @property
    def is_drained(self) -> bool:
        """Whether all that the workers printed has come out."""
        return all(stream.is_closed for worker in self.workers.values() for stream in worker.streams.values())

    def close_streams(self) -> None:
        """Closes what has not come out; nobody reads it."""
        for worker in self.workers.values():
            for stream in worker.streams.values():
                stream.close()

    def give_up(self, why: str) -> None:
        """Counts the host as lost, unless it is."""
        if not self.is_over:
            self._lose(why)

    def _listen(self, data: bytes) -> None:
        self._heard_at, self._heard_time = time.monotonic(), time.time()
        if not data:
            self._ended_at = self._heard_at
            return
        if self.is_over:
            return  # it was given up, and everybody was told so
        if not self.is_up:
            noise, found, data = (self._greeting + data).partition(GREETING)
            self._greeting = noise[-_MOST_SAID_BYTES:]
            if not found:
                return
            self.is_up = True
        try:
            for message, payload in self._decoder.push(data):
                self._take(message, payload)
        except ProtocolError as strange:
            self._lose(f"What came from {self.host} is none of the agent's messages: {strange}.")

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
            self._let_go(None)
        elif what != "pong":
            self.workers[message["worker"]].take(message, payload, self.clock_s)

    def _last_words(self) -> str:
        code = self.child.poll()
        said = [line.strip() for line in (self.said + self._greeting).decode(errors="replace").splitlines()]
        told = "; ".join(line for line in said[-5:] if line)
        what = "The connection ended" if self.is_up else "There was no connection"
        return f"{what}: {told or 'nothing was said'} (exit code {code})."

    def _lose(self, why: str) -> None:
        self.loss = Loss(why, self._heard_time)
        self._let_go(self.loss)

    def _let_go(self, loss: Loss | None) -> None:
        for worker in self.workers.values():
            worker.lose(loss)
        for question in self._questions.values():
            if not question.is_done:
                question.is_done, question.error = True, loss.text if loss else "The agent has left."
