"""The meeting before training, when somebody else comes to the port."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing

import pytest
from meeting_threads import SHORT_S, Job, connected

from tfdistkit.cluster import meeting_wire, ports
from tfdistkit.errors import RendezvousError

STRANGERS = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes": bytes(range(256)) + b"\n",
    "an endless line": b"x" * (2 * meeting_wire.LONGEST_HELLO_BYTES),
    "deep nesting": b"[" * 200_000 + b"\n",
    "JSON of others": b'{"magic": "other"}\n',
    "half a hello": json.dumps({"magic": meeting_wire.MAGIC, "kind": "hello", "rank": "1"}).encode() + b"\n",
    "an empty line": b"\n",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_do_not_disturb(name: str) -> None:
    job = Job(2)
    job.start(0)
    with closing(connected(job.port)) as stranger:
        try:
            stranger.sendall(STRANGERS[name])
            while stranger.recv(1000):
                pass
        except ConnectionError:
            pass  # turned away in the middle of its line
        job.start(1)
        job.assert_met(2)


def test_silent_strangers_do_not_disturb() -> None:
    job = Job(2)
    job.start(0)
    with ExitStack() as stack:
        for _ in range(100):  # more than are kept
            stack.enter_context(closing(connected(job.port)))
        job.start(1)
        job.assert_met(2)
    assert ports.is_free("", job.port)


def test_strangers_are_named_when_somebody_is_missing() -> None:
    job = Job(2)
    job.start(0, SHORT_S)
    with closing(connected(job.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        (message,) = job.errors(RendezvousError)
    assert "Strangers came to rank 0's port: 127.0.0.1:" in message
    assert "GET / HTTP/1.1" in message
