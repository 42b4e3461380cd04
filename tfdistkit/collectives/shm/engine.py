"""Runs the operations of a rank: a thread that talks to the other ranks of the host.

Every rank tells rank 0 what it calls. Once all have called an operation, rank 0 answers: with the result, where the
data are small enough to be sent along, or with the word to start. Operations that were started go through the shared
memory, one after the other, in the order in which rank 0 started them. Ranks may call them in any order: operations
are told apart by tags.

An operation in the shared memory is a number of steps that all ranks take together: a rank takes a step once all others
have taken the one before. In a step it writes a chunk to its memory, which the others read in the next two steps. So
three chunks for each rank are enough, which stay in the cache of the processor.
"""

from __future__ import annotations

import collections
import contextlib
import math
import mmap
import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tfdistkit.collectives.shm import messages
from tfdistkit.collectives.shm.messages import Connection, Gathering, Key, LostPeer, Mismatch, Post
from tfdistkit.collectives.shm.operation import Operation
from tfdistkit.report.hangs import notes

# Bytes of a chunk. Large enough that the steps cost little, small enough for the cache.
CHUNK_BYTES = 1 << 20
# A rank's memory has the chunks of this many steps.
CHUNKS = 3
# Up to this many bytes of a rank, data travel through the sockets.
_SENT_BYTES = 1 << 15

_POLL_S, _CLOSE_S = 0.5, 2.0
# A thread that slept for longer was stopped, as Ctrl-Z does, and its deadlines wait.
_STOPPED_S = 5.0
# A rank whose process has been suspended for so many seconds, while others wait for it, is lost.
_SUSPENDED_S = 10.0
# Ranks that all wait for so many seconds, each in another operation, while none ends, wait for ever.
_APART_S = 30.0
# Seconds that a rank waits for rank 0 to name the missing ranks.
_GRACE_S = 2.0


class Engine:
    """Runs the operations of this rank.

    Args:
        rank: This rank.
        peers: Connected sockets to all others.
        memory: The memory of all ranks, in rank order; `CHUNKS` times `CHUNK_BYTES` each.
        names: What errors call the ranks: their numbers in the job, where these are the ranks of one host of several.
        apart_s: Seconds after which ranks that all wait, each in another operation, are told so.

    Attributes:
        on_failure: If set, called in the thread of the engine with the error for which this rank ended all operations.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        memory: Sequence[mmap.mmap],
        names: Sequence[int] | None = None,
        apart_s: float | None = None,
    ):
        self.rank, self.size = rank, len(peers) + 1
        self._names, self._apart_s = range(self.size) if names is None else names, apart_s
        self.on_failure: Callable[[Exception], object] | None = None
        self._failures: collections.deque[Exception] = collections.deque()
        self._peers = {peer: Connection(connected) for peer, connected in peers.items()}
        self._memory = [np.frombuffer(one, np.uint8) for one in memory]
        self._called: collections.deque[Operation] = collections.deque()
        self._pending: dict[Key, tuple[Operation, float]] = {}
        self._counts: collections.Counter[int] = collections.Counter()
        self._gathered: dict[Key, Gathering] = {}
        self._started: collections.deque[Operation] = collections.deque()
        self._steps_of = dict.fromkeys(self._peers, 0)
        self._steps = self._first_step = 0
        self._step_at, self._ended_at = 0.0, -math.inf
        self._broken: Exception | None = None
        self._stopped_s = 0.0
        self._suspended: dict[int, tuple[float, float]] = {}  # Since when each is, and when this was looked at.
        self._lock, self._is_closed = threading.Lock(), False
        self._turning = threading.Lock()  # Held while something is done with all of the above.
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        for peer, connection in self._peers.items():
            self._selector.register(connection.socket, selectors.EVENT_READ, peer)
        _engines.add(self)
        self._thread = threading.Thread(target=self._run, name="tfdistkit-shared-memory", daemon=True)
        self._thread.start()

    def call(self, operation: Operation) -> None:
        """Starts an operation; all ranks call it. Returns at once: the operation tells when it has ended."""
        with self._lock:
            is_running = not self._is_closed
            if is_running:
                self._called.append(operation)
        if not is_running:
            operation.error = self._broken
            return operation.on_end()
        # If the thread waits, the others are told here: to wake it takes longer than that.
        is_waiting = self._turning.acquire(blocking=False)
        if is_waiting:
            try:
                with np.errstate(all="ignore"):
                    self._post_called()
            except Exception:
                self._break_by_own_error()
            finally:
                self._turning.release()
        if not is_waiting or self._started or any(c.is_waiting for c in self._peers.values()):
            self._wake_up()

    def fail(self, error: Exception) -> None:
        """Ends all operations on all ranks with a `LostPeer`, `TimedOut` or `Mismatch` that the engine cannot see."""
        with self._lock:
            if not self._is_closed:
                self._failures.append(error)
                self._wake_up()

    def close(self) -> None:
        """Ends the thread and leaves the other ranks; before TensorFlow shuts down."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._wake_up()
        self._thread.join(_CLOSE_S)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # It is full of calls, so the thread wakes anyway; or the thread has ended.
            self._wake.send(b"w")

    def _leave(self) -> None:
        """Closes the connections, and lets go of the memory."""
        for connection in self._peers.values():
            connection.socket.close()
        self._wakes.close()
        self._wake.close()
        self._selector.close()
        self._memory.clear()

    # ------------------------------------------------------------- the thread

    def _run(self) -> None:
        with np.errstate(all="ignore"):  # As TensorFlow: the sum of large numbers may be infinite.
            try:
                while not self._is_closed:
                    self._turn()
            except Exception:
                with self._turning:
                    self._break_by_own_error()
            with self._lock:
                self._is_closed = True
        with self._turning:
            self._pass_failures_on()
            self._break_down(LostPeer("this process"))
            self._post_called()
            self._leave()

    def _turn(self) -> None:
        """Waits for something to do, and does it."""
        before = time.monotonic()
        events = self._selector.select(_POLL_S)
        with self._turning:
            slept = time.monotonic() - before
            if slept > _STOPPED_S:
                self._stopped_s += slept
            for ready, _ in events:
                if ready.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._wakes.recv(1 << 12)
                else:
                    self._hear(ready.data)
            self._post_called()
            self._pass_failures_on()
            self._advance()
            if self._pending or self._gathered or self._started:
                self._check_peers()
            for peer, connection in self._peers.items():
                self._watch(peer, connection)

    def _post_called(self) -> None:
        while self._called:
            self._post(self._called.popleft())

    def _pass_failures_on(self) -> None:
        while self._failures:
            error = self._failures.popleft()
            self._tell_all(messages.BROKEN, (0, 0), messages.FAILURE_NAMES[type(error)] + str(error).encode())
            self._break_down(error)

    def _watch(self, peer: int, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_waiting else 0)
        known = self._selector.get_map().get(connection.socket)
        if known and not connection.is_open:
            self._selector.unregister(connection.socket)
        elif known and known.events != events:
            self._selector.modify(connection.socket, events, peer)

    def _now(self) -> float:
        return time.monotonic() - self._stopped_s

    # --------------------------------------------------------------- messages

    def _hear(self, peer: int) -> None:
        connection = self._peers[peer]
        connection.flush()
        for kind, key, body in connection.receive():
            if kind == messages.STEP:
                self._steps_of[peer] += 1
            elif kind == messages.POST:
                self._gather(peer, key, Post.unpacked(body))
            elif kind == messages.BROKEN:
                self._break_down(messages.FAILURES[body[:4]](body[4:].decode()))
            else:
                self._answered(kind, key, body)

    def _tell_all(self, kind: int, key: Key = (0, 0), body: bytes = b"") -> None:
        for connection in self._peers.values():
            connection.send(kind, key, body)

    def _answered(self, kind: int, key: Key, body: bytes) -> None:
        """Goes on with an operation that all ranks have called, as rank 0 says."""
        if key not in self._pending:
            return  # It failed here in the meantime.
        operation, _ = self._pending.pop(key)
        self._ended_at = self._now()
        if kind == messages.FAILED:
            return self._end(operation, Mismatch(body.decode()))
        metas, rest = messages.unpack_metas(body)
        if kind == messages.REPLY:
            operation.take(self.rank, metas, rest)
            return self._end(operation)
        operation.begin(self.rank, metas, CHUNK_BYTES)
        self._started.append(operation)
        if len(self._started) == 1:
            self._step_at = self._now()

    # ------------------------------------------------------------- operations

    def _post(self, operation: Operation) -> None:
        if operation.timeout_s < math.inf:  # Others are waited for beside the steps.
            notes.own.begin_operation(operation.call)
        if self._broken is not None:
            return self._end(operation, self._broken)
        key = (operation.tag, self._counts[operation.tag])
        self._counts[operation.tag] += 1
        self._pending[key] = (operation, self._now() + operation.timeout_s)
        data = operation.data() if operation.nbytes <= _SENT_BYTES else None
        post = Post(operation.timeout_s, operation.call, operation.meta, data)
        if self.rank == 0:
            self._gather(0, key, post)
        else:
            self._peers[0].send(messages.POST, key, post.packed())

    def _gather(self, rank: int, key: Key, post: Post) -> None:
        """On rank 0: a rank called an operation; once all have, it succeeds or fails."""
        gathering = self._gathered.setdefault(key, Gathering())
        gathering.posts[rank], gathering.posted_at = post, self._now()
        deadline = gathering.posted_at + post.timeout_s
        if deadline < gathering.deadline:
            gathering.deadline, gathering.timeout_s = deadline, post.timeout_s
        if len(gathering.posts) < self.size:
            return
        del self._gathered[key]
        posts = [gathering.posts[rank] for rank in range(self.size)]
        if len({post.call for post in posts}) > 1:
            return self._answer_all(messages.FAILED, key, [self._calls(dict(enumerate(posts))).encode()] * self.size)
        metas = [post.meta for post in posts]
        head = messages.pack_metas(metas)
        data = [post.data for post in posts if post.data is not None]
        if len(data) < self.size:
            return self._answer_all(messages.GO, key, [head] * self.size)
        replies = self._pending[key][0].replies(metas, data)
        self._answer_all(messages.REPLY, key, [head + reply for reply in replies])

    def _answer_all(self, kind: int, key: Key, bodies: list[bytes]) -> None:
        for peer, connection in self._peers.items():
            connection.send(kind, key, bodies[peer])
        self._answered(kind, key, bodies[0])

    def _advance(self) -> None:
        """Takes as many steps as the others allow."""
        while self._started and all(steps >= self._steps for steps in self._steps_of.values()):
            operation, number = self._started[0], self._steps - self._first_step
            operation.step(number, self._chunk)
            self._steps += 1
            self._step_at = self._now()
            self._tell_all(messages.STEP)
            if number + 1 == operation.steps:
                self._started.popleft()
                self._first_step = self._steps
                self._end(operation)

    def _chunk(self, rank: int, number: int) -> np.ndarray:
        at = (self._first_step + number) % CHUNKS * CHUNK_BYTES
        return self._memory[rank][at : at + CHUNK_BYTES]

    def _end(self, operation: Operation, error: Exception | None = None) -> None:
        operation.error = error
        if operation.timeout_s < math.inf:
            notes.own.end_operation()
        with contextlib.suppress(Exception):  # Nobody waits: the graph is gone, after an error of its own.
            operation.on_end()

    # --------------------------------------------------------------- failures

    def _check_peers(self) -> None:
        """Ends all operations if one of them waits for a rank that has ended, or for too long."""
        gone = [peer for peer, connection in self._peers.items() if not connection.is_open or self._is_suspended(peer)]
        for gathering in list(self._gathered.values()):
            missing = [rank for rank in range(self.size) if rank not in gathering.posts]
            lost = [rank for rank in missing if rank in gone]
            if lost:
                return self._break(b"lost", self._ranks(lost))
            if self._now() > gathering.deadline:
                return self._break(b"late", f"{gathering.timeout_s:g} seconds for {self._ranks(missing)}")
        # Those without a deadline are waited for beside the steps, and stop no rank.
        waits = [g for g in self._gathered.values() if g.deadline < math.inf]
        apart = {} if self._started else {r: g.posts[r] for g in waits for r in g.posts}
        last_at = max([self._ended_at, *(gathering.posted_at for gathering in self._gathered.values())])
        if len(apart) == self.size and self._now() > last_at + (_APART_S if self._apart_s is None else self._apart_s):
            return self._break(b"call", self._calls(apart))
        if self._started:
            behind = [peer for peer, steps in self._steps_of.items() if steps < self._steps]
            lost = [peer for peer in behind if peer in gone]
            if lost:
                return self._break(b"lost", self._ranks(lost))
            timeout_s = self._started[0].timeout_s
            if self._now() > self._step_at + timeout_s:
                return self._break(b"late", f"{timeout_s:g} seconds for {self._ranks(behind)}")
        for operation, deadline in list(self._pending.values()):
            if 0 in gone:
                return self._break(b"lost", self._ranks([0]))
            if self._now() > deadline + _GRACE_S:
                return self._break(b"late", f"{operation.timeout_s:g} seconds for {self._ranks([0])}")

    def _is_suspended(self, peer: int) -> bool:
        """Whether the process of a rank has been suspended for long; it is looked at twice a second."""
        since, looked_at = self._suspended.get(peer, (math.inf, -math.inf))
        now = self._now()
        if now - looked_at >= _POLL_S:
            is_suspended = self._peers[peer].is_suspended()
            self._suspended[peer] = since, _ = (min(since, now) if is_suspended else math.inf, now)
        return now - since > _SUSPENDED_S

    def _calls(self, posts: dict[int, Post]) -> str:
        return "; ".join(f"rank {self._names[rank]}: {posts[rank].call.decode()}" for rank in sorted(posts))

    def _ranks(self, ranks: list[int]) -> str:
        return f"rank {', '.join(str(self._names[rank]) for rank in ranks)}"

    def _break_by_own_error(self) -> None:
        self._break(b"lost", f"the thread of {self._ranks([self.rank])} failed: {traceback.format_exc()}")

    def _break(self, kind: bytes, text: str) -> None:
        """Ends all operations, here and on the other ranks."""
        error = messages.FAILURES[kind](text)
        self._tell_all(messages.BROKEN, (0, 0), kind + text.encode())
        self._break_down(error)
        if self.on_failure is not None:
            self.on_failure(error)

    def _break_down(self, error: Exception) -> None:
        if self._broken is not None:
            return
        self._broken = error
        pending = [operation for operation, _ in self._pending.values()] + list(self._started)
        self._pending.clear()
        self._gathered.clear()
        self._started.clear()
        for operation in pending:
            self._end(operation, error)


# Of this process.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _leave_in_child() -> None:
    """Closes what a forked child has of the connections: the others have to see the end of its parent."""
    for engine in list(_engines):
        engine._is_closed, engine._broken = True, LostPeer("the process that this one was forked from")
        engine._leave()


os.register_at_fork(after_in_child=_leave_in_child)
