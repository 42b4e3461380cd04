"""Handles of workers on other hosts, with pipes that relay their output."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import IO

from tfdistkit.launcher.backend import Loss
from tfdistkit.launcher.spec import ProcessSpec
from tfdistkit.launcher.ssh.agent.protocol import WINDOW_BYTES, Message, Outbox
from tfdistkit.report.alone import FILE_NAME as ALONE_FILE
from tfdistkit.report.crashes import CrashRecord, write_crash
from tfdistkit.report.hangs.mirror import MirrorWriter

# The exit code of ssh after a lost connection.
LOST_EXIT_CODE = 255


class RelayedStream:
    """One output stream of a remote worker, relayed through a pipe as if the worker were local.

    Args:
        worker: The worker's number.
        channel: `stdout` or `stderr`.
    """

    def __init__(self, worker: int, channel: str):
        reading, writing = os.pipe()
        self.reader: IO[bytes] = os.fdopen(reading, "rb", buffering=0)
        self.outbox = Outbox(writing)
        self._place = {"worker": worker, "channel": channel}
        self._has_ended = self.is_closed = False
        self._taken = 0

    def put(self, data: bytes) -> None:
        """Queues bytes from the agent."""
        if self.outbox.is_broken:
            self._taken += len(data)  # the reader is gone; credit the bytes, so that the worker does not block
        else:
            self.outbox.put(data)

    def end(self) -> None:
        """Closes the pipe once all queued bytes are written."""
        self._has_ended = True

    def close(self) -> None:
        """Closes the pipe now."""
        if not self.is_closed:
            self.is_closed = True
            os.close(self.outbox.descriptor)

    def flush(self) -> Message | None:
        """Writes as many bytes as the pipe accepts; returns the credit message for the agent, if one is due."""
        if self.is_closed:
            return None
        self._taken += self.outbox.flush()
        if self._has_ended and self.outbox.is_empty:
            self.close()
            return None
        if self._taken < WINDOW_BYTES // 4:
            return None
        taken, self._taken = self._taken, 0
        return {"do": "took", **self._place, "bytes": taken}


class RemoteWorker:
    """A worker on another host (see `backend.WorkerHandle`).

    Args:
        spec: The specification of the process.
        number: The agent's number for it.
        send: Sends a message to its agent.
    """

    def __init__(self, spec: ProcessSpec, number: int, send: Callable[[Message], None]):
        self.spec = spec
        self.host = spec.host
        self.number = number
        self.pid = 0
        self.streams = {channel: RelayedStream(number, channel) for channel in ("stdout", "stderr")}
        self.stdout, self.stderr = self.streams["stdout"].reader, self.streams["stderr"].reader
        self.loss: Loss | None = None
        self._send = send
        self._mirror = MirrorWriter(spec.folder)
        self._exit_code: int | None = None
        self._is_gone = self._is_suspended = False

    def exit_code(self) -> int | None:
        return self._exit_code

    def send_signal(self, number: int) -> None:
        if not self._is_gone:
            self._send({"do": "signal", "worker": self.number, "signal": number})

    def is_gone(self) -> bool:
        return self._is_gone

    def is_suspended(self) -> bool:
        return self._is_suspended

    def take(self, message: Message, payload: bytes, clock_s: float) -> None:
        """Handles a message of its agent.

        Args:
            message: The message.
            payload: The payload of the message.
            clock_s: The clock offset of this machine relative to the host, in seconds.
        """
        what = message["is"]
        if what == "output":
            self.streams[message["channel"]].put(payload)
        elif what == "closed":
            self.streams[message["channel"]].end()
        elif what == "crash":
            self._keep_record(payload, clock_s)
        elif what == "alone":
            with contextlib.suppress(OSError):
                (self.spec.folder / ALONE_FILE).touch()
        elif what == "ended":
            self._exit_code, self._is_suspended = message["code"], False
        elif what == "gone":
            self._is_gone = True
        elif what == "suspended":
            self._is_suspended = message["suspended"]
        elif what == "progress":
            fields = (message[name] for name in ("now_s", "state", "busy", "samples"))
            self._mirror.note(payload, *fields)
        elif what == "stacks":
            self._mirror.answer(payload, message["state"], message["runnable"])

    def request(self) -> Message | None:
        """Returns the message that asks the agent for this worker's stacks, if someone wants them."""
        if self._exit_code is not None or not self._mirror.take_request():
            return None
        return {"do": "stacks", "worker": self.number}

    def lose(self, loss: Loss | None) -> None:
        """Marks the worker as gone, together with its connection.

        Args:
            loss: The reason; None when the job is over.
        """
        if self._exit_code is None:
            self.loss, self._exit_code = loss, LOST_EXIT_CODE
        self._is_gone, self._is_suspended = True, False
        for stream in self.streams.values():
            stream.end()

    def _keep_record(self, payload: bytes, clock_s: float) -> None:
        """Stores the crash record in the worker's local folder; the report works without it."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = CrashRecord(**json.loads(payload))
            write_crash(self.spec.folder, replace(record, time=record.time + clock_s))
