"""Measures how fast processes of this machine reach each other: over loopback, and through shared memory."""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor

from tfdistkit.doctor.findings import Finding, Level
from tfdistkit.doctor.network import Link, as_finding
from tfdistkit.launcher.ssh.agent.links import LinkServer, measure_link

_LOOPBACK = "127.0.0.1"
_DEADLINE_S = 30.0
# Larger than any cache.
_COPIED_BYTES = 64 << 20
# As collectives/shm, whose chunks stay in the cache.
_CHUNK_BYTES = 1 << 20
_COPIES = 3
# A small operation through shared memory takes about so long (benchmarks/README.md).
_OPERATION_S = 1e-3


def measure_here() -> tuple[list[Finding], list[Link]]:
    """Measures loopback and shared memory.

    Returns:
        The findings; and the links that workers of this machine use by default: shared memory.
    """
    shared = _measure_memory()
    findings = [as_finding(shared)]
    try:
        findings.insert(0, as_finding(_measure_loopback()))
    except (OSError, TimeoutError) as error:
        do = "Check the loopback interface: ip addr show lo"
        findings.insert(0, Finding("links", "loopback", Level.PROBLEM, str(error), do))
    return findings, [shared]


def _measure_loopback() -> Link:
    server = LinkServer()
    port = server.open(_LOOPBACK)
    with ThreadPoolExecutor(max_workers=1) as executor:
        serving = executor.submit(server.serve)
        measured = measure_link(_LOOPBACK, port)
        serving.result(_DEADLINE_S)
    return Link("loopback", measured["bytes_per_s"], measured["round_trip_s"])


def _measure_memory() -> Link:
    """Copies into shared memory and out of it by chunks, as a tensor travels from one process to another."""
    source, target, times = memoryview(bytearray(_COPIED_BYTES)), memoryview(bytearray(_COPIED_BYTES)), []
    with mmap.mmap(-1, _CHUNK_BYTES) as mapped, memoryview(mapped) as shared:
        for _ in range(_COPIES):
            started = time.perf_counter()
            for begin in range(0, _COPIED_BYTES, _CHUNK_BYTES):
                shared[:] = source[begin : begin + _CHUNK_BYTES]
                target[begin : begin + _CHUNK_BYTES] = shared
            times.append(time.perf_counter() - started)
    return Link("shared memory", _COPIED_BYTES / min(times), _OPERATION_S, is_memory=True)
