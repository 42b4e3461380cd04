"""The protocol between the launcher and its agents: whole messages, in order, without blocking writes."""

from __future__ import annotations

import os

import pytest

from tfdistkit.launcher.ssh.agent.protocol import WINDOW_BYTES, Decoder, Outbox, ProtocolError, encode, read_now
from tfdistkit.launcher.ssh.workers import RelayedStream

MESSAGES = [({"do": "ping"}, b""), ({"is": "output", "worker": 3}, bytes(range(256)) * 3), ({"text": "\n\0ø"}, b"\n")]
STREAM = b"".join(encode(message, payload) for message, payload in MESSAGES)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_messages_round_trip(size: int) -> None:
    decoder = Decoder()
    found = [one for start in range(0, len(STREAM), size) for one in decoder.push(STREAM[start : start + size])]
    assert [({k: v for k, v in message.items() if k != "size"}, payload) for message, payload in found] == MESSAGES


@pytest.mark.parametrize("line", [b"bash: no such thing\n", b"[1]\n", b'{"size": -1}\n', b'{"size": "9"}\n', b"\xff\n"])
def test_invalid_messages_are_rejected(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        Decoder().push(encode({"do": "ping"}) + line)


def test_an_outbox_keeps_unwritten_bytes() -> None:
    reading, writing = os.pipe()
    outbox = Outbox(writing)
    data = os.urandom(300_000)
    outbox.put(data)
    got = b""
    while not outbox.is_empty:
        outbox.flush()
        got += os.read(reading, 10_000)
    while len(got) < len(data):
        got += os.read(reading, 100_000)
    assert got == data
    os.close(reading)
    outbox.put(b"more")
    outbox.flush()
    assert outbox.is_broken and outbox.is_empty
    os.close(writing)


def test_a_stream_credits_only_forwarded_bytes() -> None:
    stream = RelayedStream(5, "stdout")
    sent, taken, got = 0, 0, b""
    os.set_blocking(stream.reader.fileno(), False)
    for _ in range(40):
        if sent - taken < WINDOW_BYTES:
            stream.put(b"x" * 60_000)
            sent += 60_000
        credit = stream.flush()
        if credit is not None:
            assert (credit["do"], credit["worker"], credit["channel"]) == ("took", 5, "stdout")
            taken += credit["bytes"]
        got += read_now(stream.reader.fileno()) or b""
        assert len(got) <= sent and taken <= len(got) + 65_536, "a pipe holds 64 KiB"
    assert sent - taken < WINDOW_BYTES + 60_000
    stream.end()
    while not stream.is_closed:
        stream.flush()
        got += read_now(stream.reader.fileno()) or b""
    while more := read_now(stream.reader.fileno()):
        got += more
    assert len(got) == sent
    stream.reader.close()


def test_a_stream_without_a_reader_still_gives_credit() -> None:
    stream = RelayedStream(0, "stderr")
    stream.reader.close()
    stream.put(b"x")
    stream.flush()
    stream.put(b"x" * WINDOW_BYTES)
    credit = stream.flush()
    assert credit is not None and credit["bytes"] >= WINDOW_BYTES
    stream.end()
    stream.flush()
    assert stream.is_closed
