"""Show the workers' output: whole lines prefixed with `[name] `, and progress bars.

A progress bar is a line that is repeatedly overwritten with a carriage return. On a terminal, one such line stays at
the bottom and other lines appear above it. Elsewhere, only its final state is shown, and every few seconds its current
state.

A single worker gets no prefix: its bytes pass through unchanged. TensorFlow's startup messages are hidden (see
`report.startup_lines`), and so are tracebacks that another worker has already printed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdistkit.launcher.output.same_tracebacks import SameTracebacks
from tfdistkit.launcher.output.sinks import Sink
from tfdistkit.report.startup_lines import StartupLines

_ERASE_LINE = b"\r\x1b[K"
# Refresh interval of a progress bar where the output is not a terminal.
_SHOW_UNFINISHED_S = 5.0
# Longer lines are split.
_LONGEST_LINE_BYTES = 65_536
# Cyan, yellow, green, magenta, blue, and the same brighter; red is for errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
# How long a partial line is withheld that may turn out to be a hidden one: TensorFlow writes its lines at once.
_HELD_S = 0.1
# The filter of each channel.
_HIDDEN: Mapping[str, Callable[[], StartupLines]] = {"stderr": StartupLines}


class LineBuffer:
    """Splits one stream into lines as a terminal would show them."""

    def __init__(self) -> None:
        self._unfinished = b""

    def push(self, data: bytes) -> list[bytes]:
        """Adds the next bytes; returns the lines that they complete, without newlines."""
        *lines, rest = (self._unfinished + data).split(b"\n")
        finished = [_visible(line) for line in lines]
        if len(rest) > _LONGEST_LINE_BYTES:
            finished.append(_visible(rest))
            rest = b""
        # Text before a carriage return is overwritten.
        kept = _last_segment(rest)
        self._unfinished = kept + b"\r" if rest.endswith(b"\r") else kept
        return finished

    @property
    def unfinished(self) -> bytes:
        """The current partial line."""
        return _visible(self._unfinished)


def _visible(line: bytes) -> bytes:
    # Keras returns to the start of its bar with one backspace per character, and a carriage return.
    return _last_segment(line).rstrip(b"\b")


def _last_segment(line: bytes) -> bytes:
    """Returns the last non-empty part between carriage returns."""
    for segment in reversed(line.split(b"\r")):
        if segment.strip(b"\b"):
            return segment
    return b""


class Console:
    """Shows the output of all workers. Thread-safe.

    Args:
        stdout: The sink for the workers' stdout; it must not block.
        stderr: The sink for their stderr, and for notes.
        labels: The prefix of each worker; all methods identify a worker by its index in this list.
        hidden: The filter of each channel; an empty mapping hides nothing.
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
        # The worker and channel of the progress bar at the bottom of the terminal.
        self._bar: tuple[int, str] | None = None
        # Without a terminal: the time and the text of the last display of a partial line.
        self._shown: dict[tuple[int, str], tuple[float, bytes]] = {}

    @property
    def problem(self) -> str:
        """The first write error, such as a full disk; empty without an error."""
        return next((f"{channel}: {sink.problem}" for channel, sink in self._sinks.items() if sink.problem), "")

    def has_room(self, timeout_s: float) -> bool:
        """Waits until the sinks accept more output; returns whether they do."""
        return all(sink.has_room(timeout_s) for sink in self._sinks.values())

    def finish(self, idle_s: float = 2.0, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all output is written, while the reader makes progress.

        Args:
            idle_s: The timeout without progress, in seconds.
            should_stop: Whether to stop waiting.

        Returns:
            Whether all output is written.
        """
        return all([sink.finish(idle_s, should_stop) for sink in self._sinks.values()])

    def show(self, worker: int, channel: str, data: bytes) -> None:
        """Shows output of a worker.

        Args:
            worker: Its index in `labels`.
            channel: `stdout` or `stderr`.
            data: The bytes that it wrote.
        """
        with self._lock:
            key = (worker, channel)
            startup = self._filter(key)
            if self._is_raw:
                self._sinks[channel].write(startup.pass_on(data) if startup else data)
                return
            buffer = self._buffers.setdefault(key, LineBuffer())
            lines = buffer.push(data)
            if startup:
                lines = [line for line in lines if not startup.hides(line)]
            if channel == "stderr":
                lines = self._tracebacks.shorten(worker, lines, self._labels)
            self._print_lines(key, lines)
            if self._sinks[channel].is_terminal and not (startup and startup.may_hide(buffer.unfinished)):
                self._draw_bar(key)

    def refresh(self) -> None:
        """Shows progress bars where the output is not a terminal; must be called periodically."""
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
        """Shows the last, partial line of a worker."""
        key = (worker, channel)
        if self._is_raw:
            self._let_go(0.0)
        with self._lock:
            self._filters.pop(key, None)
            buffer = self._buffers.pop(key, LineBuffer())
            if buffer.unfinished:
                self._print_lines(key, [buffer.unfinished])
            self._shown.pop(key, None)

    def begin_attempt(self, labels: Sequence[str]) -> None:
        """Starts a new attempt, perhaps with another number of workers; its tracebacks are shown again.

        Args:
            labels: The prefix of each worker.
        """
        with self._lock:
            self._tracebacks.forget()
            self._labels = [label.encode() for label in labels]
            # What was shown with prefixes so far keeps them.
            self._is_raw = self._is_raw and len(labels) == 1

    def note(self, text: str) -> None:
        """Shows a message of the launcher.

        Args:
            text: One or more lines, without a trailing newline.
        """
        with self._lock:
            self._write_above_bar("stderr", text.encode(errors="replace") + b"\n")

    def _filter(self, key: tuple[int, str]) -> StartupLines | None:
        if key[1] in self._hidden and key not in self._filters:
            self._filters[key] = self._hidden[key[1]]()
        return self._filters.get(key)

    def _let_go(self, after_s: float) -> None:
        """Shows withheld partial lines: a prompt for the user has no newline."""
        with self._lock:
            for (_, channel), startup in self._filters.items():
                self._sinks[channel].write(startup.let_go(after_s))

    def _print_lines(self, key: tuple[int, str], lines: list[bytes]) -> None:
        shown_at, shown = self._shown.pop(key, (0.0, b""))
        if lines and lines[0] == shown and shown:
            lines = lines[1:]  # the refresh has already shown this final state
        elif not lines:
            if shown_at:
                self._shown[key] = (shown_at, shown)
            return
        if self._bar == key:
            # The bar is complete: it is printed as an ordinary line.
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
        """Draws the partial line of a worker as the bar, unless a worker with a lower index has the bar."""
        text = self._buffers[key].unfinished
        if text and (self._bar is None or key <= self._bar):
            self._sinks[key[1]].write(_ERASE_LINE + self._prefixed(key, text))
            self._bar = key

    def _prefixed(self, key: tuple[int, str], line: bytes) -> bytes:
        worker = key[0]
        label = self._labels[worker] if worker < len(self._labels) else str(worker).encode()
        if self._sinks[key[1]].has_colours:
            return b"\x1b[%dm[%s]\x1b[0m %s" % (_COLOURS[worker % len(_COLOURS)], label, line)
        return b"[%s] %s" % (label, line)
