"""Ranks that share memory, as threads of one process: each has an engine with sockets and memory of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tfdistkit.collectives.shm import engine, peers
from tfdistkit.collectives.shm.engine import Engine
from tfdistkit.collectives.shm.operation import Operation

DEADLINE_S = 60.0


@contextlib.contextmanager
def engines(size: int) -> Iterator[list[Engine]]:
    """Provides connected engines, one for each rank; closes them at the end."""
    listeners = [peers.Listener() for _ in range(size)]
    facts = [{peers.FACT: listener.place} for listener in listeners]
    assert len(peers.ranks_of_hosts(facts)) == 1

    def start(rank: int) -> Engine:
        connected = peers.connect(listeners[rank], rank, facts, DEADLINE_S)
        return Engine(rank, connected, peers.share_memory(rank, connected, engine.CHUNKS * engine.CHUNK_BYTES))

    with ThreadPoolExecutor(size) as pool:
        running = list(pool.map(start, range(size)))
    try:
        yield running
    finally:
        for one in running:
            one.close()


def begin(
    on: Engine, kind: Callable[..., Operation], *arguments: Any, tag: int = 0, timeout_s: float = DEADLINE_S
) -> Any:
    """Calls an operation on one rank; returns a function that waits for it and returns its result, or raises."""
    ended = threading.Event()
    operation = kind(tag, *arguments, timeout_s, ended.set)
    on.call(operation)

    def wait() -> list[np.ndarray]:
        assert ended.wait(DEADLINE_S), "it did not end"
        if operation.error is not None:
            raise operation.error
        return operation.result

    return wait


def together(
    running: list[Engine], kind: Callable[..., Operation], arguments: Callable[[int], tuple], **options: Any
) -> list[list[np.ndarray]]:
    """Calls an operation on all ranks and returns their results.

    Args:
        running: The engines.
        kind: The operation.
        arguments: Returns those of a rank.
        **options: For `begin`.
    """
    waits = [begin(one, kind, *arguments(one.rank), **options) for one in running]
    return [wait() for wait in waits]
