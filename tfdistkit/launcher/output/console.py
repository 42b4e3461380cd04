"""What the user sees of the workers: whole lines with `[name] ` before them, progress bars that stay in place.

A progress bar is a line that ends in a carriage return instead of a newline, again and again. On a terminal one such
line stays the last line and other workers' lines appear above it. Where the output is no terminal, only its last
state is shown, and every few seconds the state so far.

A single worker needs no prefix: its bytes pass through as they are. What TensorFlow logs at each start is left out
(see `report.startup_lines`), and so is a traceback that another worker has brought already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdistkit.launcher.output.same_tracebacks import SameTracebacks
from tfdistkit.launcher.output.sinks import Sink
from tfdistkit.report.startup_lines import StartupLines

_ERASE_LINE = b"\r\x1b[K"
# How often a progress bar shows on what is no terminal.
_SHOW_UNFINISHED_S = 5.0
# A line that is longer is shown in parts.
_LONGEST_LINE_BYTES = 65_536
# Cyan, yellow, green, magenta, blue, and the same brighter; red is for errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
# How long the beginning of a line is held back that can become a hidden one: the rest comes at once, or never.
_HELD_S = 0.1
# Where start-up lines are looked for.
_HIDDEN: Mapping[str, Callable[[], StartupLines]] = {"stderr": StartupLines}


class LineBuffer:
    """Cuts one stream into lines as a terminal would show them."""

    def __init__(self) -> None:
        self._unfinished = b""

    def push(self, data: bytes) -> list[bytes]:
        """Takes the next bytes; returns the lines that they finish, without newlines."""
        *lines, rest = (self._unfinished + data).split(b"\n")
        finished = [_visible(line) for line in lines]
        if len(rest) > _LONGEST_LINE_BYTES:
            finished.append(_visible(rest))
            rest = b""
        # What a carriage return has overwritten is never needed again.
        kept = _last_segment(rest)
        self._unfinished = kept + b"\r" if rest.endswith(b"\r") else kept
        return finished

    @property
    def unfinished(self) -> bytes:
        """The line so far."""
        return _visible(self._unfinished)


def _visible(line: bytes) -> bytes:
    # Keras goes back to the start of its bar with as many backspaces as it is long, and a carriage return.
    return _last_segment(line).rstrip(b"\b")


def _last_segment(line: bytes) -> bytes:
    """The part after the last carriage return that something follows."""
    for segment in reversed(line.split(b"\r")):
        if segment.strip(b"\b"):
            return segment
    return b""


class Console:
    """Shows the output of all workers. Any thread may call any method.

    Args:
        stdout: Where the workers' stdout goes: a sink that does not wait for who reads.
        stderr: Where their stderr goes, and notes.
        labels: What stands before the lines of each worker; they are known by their place in this list from then on.
        hidden: What is left out of which of a worker's two streams; nothing shows all.
    """

    def __init__(
        self,
        stdout: Sink,
        stderr: Sink,
        labels: Sequence[str],
        hidden: Mapping[str, Callable[[], StartupLines]] = _HIDDEN,
    ):
        self._sinks = {"stdout": stdout, "stderr": stderr}
        self._labels = [label.encode() for label in labels]
        self._is_raw = len(labels) == 1
        self._lock = threading.Lock()
        self._buffers: dict[tuple[int, str], LineBuffer] = {}
        self._hidden = hidden
        self._filters: dict[tuple[int, str], StartupLines] = {}
        self._tracebacks = SameTracebacks()
        # The progress bar at the bottom of the terminal: whose it is.
        self._bar: tuple[int, str] | None = None
        # When an unfinished line was shown last where there is no terminal, and what was shown.
        self._shown: dict[tuple[int, str], tuple[float, bytes]] = {}

    @property
    def problem(self) -> str:
        """Why something could not be shown, such as a full disk; empty while all is well."""
        return next((f"{channel}: {sink.problem}" for channel, sink in self._sinks.items() if sink.problem), "")

    def has_room(self, timeout_s: float) -> bool:
        """Whether who reads has taken what was shown, now or before the time is over."""
        return all(sink.has_room(timeout_s) for sink in self._sinks.values())

    def finish(self, idle_s: float = 2.0, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all is shown, for as long as somebody reads.

        Args:
            idle_s: Nobody does if so many seconds pass without a byte.
            should_stop: Whether to stop waiting.

        Returns:
            Whether all is shown.
        """
        return all([sink.finish(idle_s, should_stop) for sink in self._sinks.values()])

    def show(self, worker: int, channel: str, data: bytes) -> None:
        """Takes what a worker wrote.

        Args:
            worker: Its place in `labels`.
            channel: `stdout` or `stderr`.
            data: Any bytes.
        """
        with self._lock:
            key = (worker, channel)
            known = self._filter(key)
            if self._is_raw:
                self._sinks[channel].write(known.pass_on(data) if known else data)
                return
            buffer = self._buffers.setdefault(key, LineBuffer())
            lines = buffer.push(data)
            if known:
                lines = [line for line in lines if not known.hides(line)]
            if channel == "stderr":
                lines = self._tracebacks.shorten(worker, lines, self._labels)
            self._print_lines(key, lines)
            if self._sinks[channel].is_terminal and not (known and known.may_hide(buffer.unfinished)):
                self._draw_bar(key)

    def refresh(self) -> None:
        """Shows the state of progress bars on what is no terminal; to be called now and then."""
        if self._is_raw:
            self._let_go(_HELD_S)
            return
        now = time.monotonic()
        with self._lock:
            for key, buffer in self._buffers.items():
                text = buffer.unfinished
                since, before = self._shown.setdefault(key, (now, b""))
                if text == before or self._sinks[key[1]].is_terminal:
                    continue
                if now - since >= _SHOW_UNFINISHED_S:
                    self._sinks[key[1]].write(self._prefixed(key, text) + b"\n")
                    self._shown[key] = (now, text)

    def end(self, worker: int, channel: str) -> None:
        """Shows what a worker left unfinished on its last line."""
        key = (worker, channel)
        if self._is_raw:
            self._let_go(0.0)
        with self._lock:
            self._filters.pop(key, None)
            buffer = self._buffers.pop(key, LineBuffer())
            if buffer.unfinished:
                self._print_lines(key, [buffer.unfinished])
            self._shown.pop(key, None)

    def begin_attempt(self) -> None:
        """Tells that all workers start, for the first time or again."""
        with self._lock:
            self._tracebacks.forget()

    def note(self, text: str) -> None:
        """Shows a message of the launcher itself.

        Args:
            text: One or more lines, without a newline at the end.
        """
        with self._lock:
            self._write_above_bar("stderr", text.encode(errors="replace") + b"\n")

    def _filter(self, key: tuple[int, str]) -> StartupLines | None:
        if key[1] in self._hidden and key not in self._filters:
            self._filters[key] = self._hidden[key[1]]()
        return self._filters.get(key)

    def _let_go(self, after_s: float) -> None:
        """Shows what was held back to see what becomes of it: a question to the user has no newline."""
        with self._lock:
            for (_, channel), known in self._filters.items():
                self._sinks[channel].write(known.let_go(after_s))

    def _print_lines(self, key: tuple[int, str], lines: list[bytes]) -> None:
        shown_at, shown = self._shown.pop(key, (0.0, b""))
        if lines and lines[0] == shown and shown:
            lines = lines[1:]  # its last state was shown just as it is now
        elif not lines:
            if shown_at:
                self._shown[key] = (shown_at, shown)
            return
        if self._bar == key:
            # The bar itself is finished: it becomes a line like all others.
            self._sinks[key[1]].write(_ERASE_LINE)
            self._bar = None
        self._write_above_bar(key[1], b"".join(self._prefixed(key, line) + b"\n" for line in lines))

    def _write_above_bar(self, channel: str, data: bytes) -> None:
        sink = self._sinks[channel]
        if self._bar is None or not sink.is_terminal:
            sink.write(data)
            return
        bar = self._prefixed(self._bar, self._buffers[self._bar].unfinished)
        sink.write(_ERASE_LINE + data)
        self._sinks[self._bar[1]].write(bar)

    def _draw_bar(self, key: tuple[int, str]) -> None:
        """The unfinished line of the first worker is the one that shows."""
        text = self._buffers[key].unfinished
        if text and (self._bar is None or key <= self._bar):
            self._sinks[key[1]].write(_ERASE_LINE + self._prefixed(key, text))
            self._bar = key

    def _prefixed(self, key: tuple[int, str], line: bytes) -> bytes:
        place = key[0]
        label = self._labels[place] if place < len(self._labels) else str(place).encode()
        if self._sinks[key[1]].has_colours:
            return b"\x1b[%dm[%s]\x1b[0m %s" % (_COLOURS[place % len(_COLOURS)], label, line)
        return b"[%s] %s" % (label, line)
