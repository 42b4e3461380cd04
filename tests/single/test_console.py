"""The console: prefixes, whole lines, progress bars."""

from __future__ import annotations

import io
import os
import re
import threading
from pathlib import Path

import pytest

from tfdistkit.launcher.output import console as console_module
from tfdistkit.launcher.output.console import Console, LineBuffer
from tfdistkit.launcher.output.sinks import DescriptorSink, Sink, TextSink
from tfdistkit.report import startup_lines


class Screen(Sink):
    """A sink that remembers, and plays a terminal of endless width."""

    def __init__(self, is_terminal: bool):
        self.is_terminal = is_terminal
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    @property
    def lines(self) -> list[str]:
        """What would stand on the screen."""
        shown = []
        for line in self.written.decode().split("\n"):
            assert line.count("\x1b") == line.count("\x1b[K")
            row = ""
            for step in re.split(r"(\r|\x1b\[K)", line):
                column = 0 if step == "\r" else None
                row = "" if step == "\x1b[K" else row if column == 0 else row + step
            shown.append(row)
        return shown


def consoles(is_terminal: bool, world_size: int = 2) -> tuple[Console, Screen]:
    screen = Screen(is_terminal)
    return Console(screen, screen, [str(rank) for rank in range(world_size)]), screen


@pytest.mark.parametrize(
    ("parts", "lines", "unfinished"),
    [
        ([b"a\nb\n"], [b"a", b"b"], b""),
        ([b"a", b"b\nc"], [b"ab"], b"c"),
        ([b"\n\n"], [b"", b""], b""),
        ([b"a\r\nb\r\n"], [b"a", b"b"], b""),
        ([b"1/2\r2/2\n"], [b"2/2"], b""),
        ([b"1/2\r", b"2/2"], [], b"2/2"),
        ([b"1/2", b"\r"], [], b"1/2"),
        ([b"1/2", b"\r", b"\n"], [b"1/2"], b""),
        # As Keras does it: backspaces, carriage return, the next state.
        ([b"1/2", b"\b\b\b\r2/2", b"\b\b\b\r2/2 done\n"], [b"2/2 done"], b""),
        ([b"1/2", b"\b\b\b", b"\r2/2"], [], b"2/2"),
        ([b"\r"], [], b""),
        ([b"x" * 70_000], [b"x" * 70_000], b""),
    ],
)
def test_lines(parts: list[bytes], lines: list[bytes], unfinished: bytes) -> None:
    buffer = LineBuffer()
    assert [line for part in parts for line in buffer.push(part)] == lines
    assert buffer.unfinished == unfinished


def test_a_progress_bar_needs_no_memory() -> None:
    buffer = LineBuffer()
    for i in range(20_000):
        buffer.push(b"\b" * 30 + b"\r%d/20000 " % i + b"=" * 20)
    assert len(buffer._unfinished) < 200


def test_every_line_is_prefixed() -> None:
    console, screen = consoles(is_terminal=False)
    console.show(0, "stdout", b"a\nb")
    console.show(1, "stdout", b"c\n")
    console.show(0, "stdout", b"b\n")
    console.show(1, "stderr", b"last words")
    console.end(1, "stderr")
    assert screen.written == b"[0] a\n[1] c\n[0] bb\n[1] last words\n"


def test_lines_of_roles() -> None:
    screen = Screen(is_terminal=True)
    console = Console(screen, screen, ["chief", "worker 0", "ps 0"])
    console.show(1, "stderr", b"ready\n")
    console.show(2, "stdout", b"serving")
    console.show(0, "stdout", b"1/2")
    assert screen.lines == ["[worker 0] ready", "[chief] 1/2"], "the coordinator's bar is the one that shows"


def test_a_bar_stays_the_last_line_of_a_terminal() -> None:
    console, screen = consoles(is_terminal=True)
    console.show(0, "stdout", b"1/3")
    assert screen.lines == ["[0] 1/3"]
    console.show(0, "stdout", b"\b\b\b\r2/3")
    assert screen.lines == ["[0] 2/3"]
    console.show(1, "stderr", b"a warning\n")
    assert screen.lines == ["[1] a warning", "[0] 2/3"]
    console.note("a note")
    assert screen.lines == ["[1] a warning", "a note", "[0] 2/3"]
    console.show(0, "stdout", b"\r3/3 done\nnext\n1/3")
    assert screen.lines == ["[1] a warning", "a note", "[0] 3/3 done", "[0] next", "[0] 1/3"]
    console.end(0, "stdout")
    console.note("the end")
    assert screen.lines == ["[1] a warning", "a note", "[0] 3/3 done", "[0] next", "[0] 1/3", "the end", ""]


def test_the_bar_of_the_lowest_rank_is_shown() -> None:
    console, screen = consoles(is_terminal=True)
    console.show(1, "stdout", b"one 1/2")
    console.show(0, "stdout", b"zero 1/2")
    console.show(1, "stdout", b"\rone 2/2")
    assert screen.lines == ["[0] zero 1/2"]
    console.show(1, "stdout", b"\n")
    assert screen.lines == ["[1] one 2/2", "[0] zero 1/2"]


def test_a_bar_is_refreshed_periodically_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now)
    console, screen = consoles(is_terminal=False)
    for i in range(10):
        console.show(0, "stdout", b"\r%d/12" % i)
        console.refresh()
        now += 1.0
    assert screen.written == b"[0] 5/12\n"
    console.show(0, "stdout", b"\r12/12\n")
    console.refresh()
    assert screen.written == b"[0] 5/12\n[0] 12/12\n"


def test_a_state_that_was_shown_is_not_shown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now)
    console, screen = consoles(is_terminal=False)
    console.show(0, "stdout", b"waiting")
    console.refresh()
    now += 60
    console.refresh()
    console.refresh()
    console.show(0, "stdout", b"\n")
    assert screen.written == b"[0] waiting\n"


def test_the_bytes_of_a_single_worker_pass_through() -> None:
    for is_terminal in (True, False):
        console, screen = consoles(is_terminal, world_size=1)
        console.show(0, "stdout", b"1/2\b\b\b\r")
        console.show(0, "stderr", b"\xff\n")
        console.refresh()
        console.end(0, "stdout")
        assert screen.written == b"1/2\b\b\b\r\xff\n"


def test_a_text_stream_gets_whole_characters() -> None:
    stream = io.StringIO()
    sink = TextSink(stream)
    for byte in "größe\n".encode() + b"\xff\n":
        sink.write(bytes([byte]))
    assert stream.getvalue() == "größe\n\ufffd\n"
    stream.close()
    sink.write(b"this has no reader\n")


def test_a_closed_reader_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        sink = DescriptorSink(writing)
        sink.write(b"lost")
        sink.write(b"lost too")
    finally:
        os.close(writing)


def test_a_slow_reader_gets_everything(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    got = bytearray()

    def read() -> None:
        while data := os.read(reading, 100_000):
            got.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    DescriptorSink(writing).write(b"x" * 1_000_000)
    os.close(writing)
    reader.join(timeout=30)
    os.close(reading)
    assert len(got) == 1_000_000


HEADER = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"


def test_startup_lines_of_tensorflow_are_hidden_from_stderr() -> None:
    for world_size in (1, 2):
        console, screen = consoles(is_terminal=False, world_size=world_size)
        console.show(0, "stderr", b"a\n" + HEADER + b"~")
        console.show(0, "stdout", HEADER)
        console.end(0, "stderr")
        label = b"[0] " * (world_size - 1)
        assert screen.written.startswith(label + b"a\n") and screen.written.count(HEADER) == 1
        assert screen.written.count(b"~") == 1


def test_a_console_that_hides_nothing() -> None:
    screen = Screen(is_terminal=False)
    console = Console(screen, screen, ["0"], hidden={})
    console.show(0, "stderr", HEADER)
    assert screen.written == HEADER


def test_a_prompt_of_a_single_worker_is_shown_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(startup_lines.time, "monotonic", lambda: now)
    console, screen = consoles(is_terminal=True, world_size=1)
    console.show(0, "stderr", b"I0001 or W0002? ")
    assert screen.written == b""
    console.refresh()
    assert screen.written == b"", "its end may be on its way"
    now += 0.2
    console.refresh()
    assert screen.written == b"I0001 or W0002? "


TRACEBACK = b'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\nKeyError: 1\n'


@pytest.mark.parametrize(
    ("second", "shown"),
    [
        (TRACEBACK, b"[1] the same traceback as [0]\n"),
        (b"before\n" + TRACEBACK + b"after\n", b"[1] before\n[1] the same traceback as [0]\n[1] after\n"),
        (TRACEBACK.replace(b": 1", b": 2"), None),
        (TRACEBACK.replace(b"line 1", b"line 2"), None),
        (TRACEBACK[:-3], None),
        (b"KeyError: 1\n", None),
    ],
)
def test_a_repeated_traceback_is_replaced(second: bytes, shown: bytes | None) -> None:
    console, screen = consoles(is_terminal=False)
    console.show(0, "stderr", TRACEBACK)
    console.show(0, "stderr", TRACEBACK)
    assert screen.written.count(b"[0] KeyError: 1\n") == 2, "a rank's own are all shown"
    screen.written = b""
    console.show(1, "stderr", second)
    console.end(1, "stderr")
    assert screen.written == (shown or b"".join(b"[1] " + line for line in second.splitlines(True))).rstrip() + b"\n"
    console.begin_attempt(["0", "1"])
    screen.written = b""
    console.show(1, "stderr", TRACEBACK)
    assert screen.written.count(b"\n") == 4


def test_the_end_of_a_message_that_differs_is_shown() -> None:
    console, screen = consoles(is_terminal=False)
    console.show(0, "stderr", TRACEBACK + b"in rank 0\n")
    console.show(1, "stderr", TRACEBACK + b"in rank 1\n")
    assert screen.written.endswith(b"[0] in rank 0\n[1] the same traceback as [0]\n[1] in rank 1\n")
