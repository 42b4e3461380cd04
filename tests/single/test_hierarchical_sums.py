"""Sums within each host, then between the hosts: what all ranks get, which tensors go this way, where it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from shm_ranks import DEADLINE_S, begin, engines, together

from tfdistkit.cluster.spec import ClusterSpec, TaskSpec
from tfdistkit.collectives.shm import peers
from tfdistkit.collectives.shm.engine import CHUNK_BYTES, Engine
from tfdistkit.collectives.shm.messages import LostPeer, Mismatch, TimedOut
from tfdistkit.collectives.shm.operation import Sum, SumOnFirst
from tfdistkit.collectives.shm.transport import SharedMemoryTransport
from tfdistkit.errors import ClusterConfigError, OptionError, UnsupportedError
from tfdistkit.strategies import multiworker
from tfdistkit.strategies.sync import peer_errors
from tfdistkit.strategies.sync.transports import hierarchical, shared_host
from tfdistkit.strategies.sync.transports.hierarchical import HierarchicalSums

pytestmark = pytest.mark.tensorflow

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


class Across:
    """Sums between the first ranks of hosts that are threads of this process."""

    def __init__(self, hosts: int):
        self._barrier = threading.Barrier(hosts)
        self._given: list[np.ndarray] = []

    def all_reduce(self, flat: tf.Tensor) -> tf.Tensor:
        self._given.append(flat.numpy())
        self._barrier.wait(DEADLINE_S)
        total = sum(sorted(self._given, key=lambda one: one.tobytes()))
        if self._barrier.wait(DEADLINE_S) == 0:
            self._given.clear()
        self._barrier.wait(DEADLINE_S)
        return tf.constant(total)


def on_hosts(sizes: Sequence[int], function: Callable[[HierarchicalSums, int], Any]) -> list[Any]:
    """Calls a function with the sums and the number of each rank, in a thread for each; returns the results."""
    hosts = [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
    across = Across(len(hosts))
    with ExitStack() as stack, ThreadPoolExecutor(sum(sizes)) as pool:
        sums = []
        for ranks in hosts:
            running: list[Any] = stack.enter_context(engines(len(ranks))) if len(ranks) > 1 else [None]
            for rank, engine in zip(ranks, running):
                within = SharedMemoryTransport(engine, DEADLINE_S) if engine is not None else None
                sums.append(HierarchicalSums(within, rank, hosts, DEADLINE_S))
                sums[-1]._across = [across]
        return list(pool.map(function, sums, range(sum(sizes))))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("op", [SUM, MEAN])
def test_all_ranks_get_the_same_bits(sizes: tuple[int, ...], op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "BUCKET_BYTES", 1 << 19)
    shapes = [(), (5,), (400, 300), (0, 4), (300, 1000), (7, 2)]
    given = [[np.random.default_rng(r).normal(size=s).astype("float32") for s in shapes] for r in range(sum(sizes))]
    results = on_hosts(sizes, lambda sums, rank: [one.numpy() for one in sums.all_reduce(given[rank], op)])
    for i, shape in enumerate(shapes):
        expected = sum(one[i].astype("float64") for one in given) / (len(given) if op == MEAN else 1)
        assert results[0][i].shape == shape
        np.testing.assert_allclose(results[0][i], expected, rtol=1e-5, atol=1e-5)
        for other in results[1:]:
            np.testing.assert_array_equal(other[i], results[0][i])


def test_dtypes_are_kept_and_not_mixed() -> None:
    given = [tf.ones([30_000], dtype) for dtype in (tf.float32, tf.bfloat16, tf.float64, tf.float16, tf.bfloat16)]
    for result in on_hosts((2, 1), lambda sums, _: sums.all_reduce(given, SUM)):
        assert [one.dtype for one in result] == [one.dtype for one in given]
        assert all((one.numpy().astype("float32") == 3).all() for one in result)


def test_only_many_dense_floats_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = HierarchicalSums(None, 0, [[0], [1, 2]], 1.0)
    large = tf.zeros([hierarchical.LARGE_BYTES // 4])
    rows = tf.IndexedSlices(large[None], tf.constant([0]), tf.constant([1, *large.shape]))
    assert sums.takes([large, rows, tf.cast(large, tf.int32), large[:5]]) == [0, 3]
    assert sums.takes([large[1:], large[:0]]) == [] and sums.takes([large[2:], large[:1], large[:1]]) == [0, 1, 2]
    assert sums.takes([tf.cast(large, tf.float16)]) == []

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def of_any_length(tensor: tf.Tensor) -> tf.Tensor:
        assert sums.takes([tensor]) == []
        return tensor

    of_any_length(large)


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    with engines(request.param) as running:
        yield running


@pytest.mark.parametrize("size", [0, 1, 8193, CHUNK_BYTES // 4 + 1, 1_000_003])
def test_the_first_rank_gets_the_sums_of_all_arrays(ranks: list[Engine], size: int) -> None:
    given = [[np.random.default_rng(r).normal(size=n) for n in (size, 3)] for r in range(len(ranks))]
    (first,), *others = together(ranks, SumOnFirst, lambda rank: (given[rank],))
    flat = [np.concatenate(one) for one in given]
    np.testing.assert_array_equal(first, sum(flat[1:], flat[0]))  # In the order of the ranks.
    assert all(one.size == 0 for (one,) in others)
    [summed] = {one[0].tobytes() for one in together(ranks, Sum, lambda rank: ([np.concatenate(given[rank])],))}
    assert summed == first.tobytes()


@pytest.mark.parametrize("error", [LostPeer("rank 7"), TimedOut("9 seconds for rank 7"), Mismatch("rank 7: other")])
def test_an_error_that_one_rank_tells_ends_the_operations_of_all(ranks: list[Engine], error: Exception) -> None:
    told: list[Exception] = []
    for one in ranks:
        one.on_failure = told.append
    waits = [begin(one, Sum, [np.zeros(3)]) for one in ranks[1:]]
    ranks[0].fail(error)
    for wait in waits:
        with pytest.raises(type(error), match=str(error)):
            wait()
    assert told == [], "it came from outside"


def test_ranks_of_a_host_have_their_numbers_in_the_job() -> None:
    listeners = [peers.Listener() for _ in range(2)]
    facts = [{peers.FACT: "1 elsewhere"}, *({peers.FACT: one.place} for one in listeners)]
    assert peers.ranks_of_hosts([*facts, {}, facts[0]]) == [[0, 4], [1, 2], [3]]

    def start(rank: int) -> Engine:
        connected = peers.connect(listeners[rank - 1], rank, facts, DEADLINE_S, [1, 2])
        memory = peers.share_memory(rank - 1, connected, 3 * CHUNK_BYTES)
        return Engine(rank - 1, connected, memory, [1, 2])

    with ThreadPoolExecutor(2) as pool:
        running = list(pool.map(start, (1, 2)))
    told: list[Exception] = []
    running[0].on_failure = told.append
    wait = begin(running[0], Sum, [np.zeros(3)])
    running[1].close()
    with pytest.raises(LostPeer, match="rank 2"):
        wait()
    running[0].close()
    assert [str(one) for one in told] == ["rank 2"]


def cluster(size: int) -> ClusterSpec:
    return ClusterSpec({"worker": tuple(f"127.0.0.1:{i + 1}" for i in range(size))}, TaskSpec("worker", 0))


@pytest.mark.parametrize(
    ("places", "told"),
    [(["1 a", "1 b"], "2 ranks on one host.*shm"), (["1 a", "1 b", ""], "system of rank 2"), (["", ""], "rank 0, 1")],
)
def test_a_placement_that_it_cannot_use_is_refused_by_name(places: list[str], told: str) -> None:
    own = shared_host.Offer("hierarchical", "Average", None)
    facts = [{**own.facts, **({peers.FACT: place} if place else {})} for place in places]
    with pytest.raises(ClusterConfigError, match=f"(?s){told}"):
        shared_host.share(own, cluster(len(places)), facts, 1.0)


@pytest.mark.parametrize(
    ("places", "hosts"),
    [(["2 b", "1 a"], None), (["1 a", "1 b", ""], None), (["1 a", "2 a", "2 b"], [[0], [1, 2]])],
)
def test_hosts_of_several_ranks_share_memory_by_default(places: list[str], hosts: list[list[int]] | None) -> None:
    """And those of one rank, or where a rank cannot share memory, use the ring."""
    own = shared_host.Offer("auto", "Average", None)
    facts = [{**own.facts, **({peers.FACT: place} if place else {})} for place in places]
    expected = None if hosts is None else shared_host.Shared(None, hosts)
    assert shared_host.share(own, cluster(len(places)), facts, 1.0) == expected


@pytest.mark.parametrize(("name", "installed", "places", "lines"), [
    ("auto", True, ["1 a", "2 b"], 1), ("ring", True, ["1 a", "2 b"], 0), ("auto", False, ["1 a", "2 b"], 0),
    ("auto", True, ["", ""], 0),
])  # fmt: skip
def test_horovod_is_suggested_between_hosts_where_it_is_installed(
    name: str, installed: bool, places: list[str], lines: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(shared_host.importlib.util, "find_spec", lambda name: object() if installed else None)
    own = shared_host.Offer(name, "Average", None)
    facts = [{**own.facts, **({peers.FACT: place} if place else {})} for place in places]
    assert shared_host.share(own, cluster(2), facts, 1.0) is None
    assert [one.message.count("--backend horovod") for one in caplog.records] == [1] * lines


def test_memory_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def refused(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(peers.os, "memfd_create", refused)
    own = shared_host.offer("auto", "Average")
    assert own.listener is None
    assert [one.message.count("Operation not permitted") for one in caplog.records] == [1]
    facts = [own.facts, {**own.facts, peers.FACT: "1 a"}]
    assert shared_host.share(own, cluster(2), facts, 1.0) is None
    own = shared_host.offer("shm", "Average")
    with pytest.raises(ClusterConfigError, match="no shared memory on this system"):
        shared_host.share(own, cluster(2), [own.facts, own.facts], 1.0)


@pytest.mark.parametrize(
    ("places", "error", "told"),
    [
        (["1 a", "1 b"], ClusterConfigError, "2 ranks on one host, algorithm=Hierarchical(?s:.*)Leave `algorithm` out"),
        (["1 a", "2 b", ""], UnsupportedError, "no shared memory on the system of rank 2"),
    ],
)
def test_an_algorithm_for_several_hosts_is_refused_elsewhere(places: list[str], error: Any, told: str) -> None:
    own = shared_host.Offer("auto", "Hierarchical()", None, needs_hosts=True)
    facts = [{**own.facts, **({peers.FACT: place} if place else {})} for place in places]
    with pytest.raises(error, match=told):
        shared_host.share(own, cluster(len(places)), facts, 1.0)


def test_an_algorithm_for_several_hosts_knows_hosts_of_one_rank() -> None:
    own = shared_host.Offer("auto", "Hierarchical()", None, needs_hosts=True)
    facts = [{**own.facts, peers.FACT: place} for place in ("1 a", "2 b", "3 c")]
    assert shared_host.share(own, cluster(3), facts, 1.0) == shared_host.Shared(None, [[0], [1], [2]])


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1, 1), (2, 2)])
def test_what_is_equal_within_a_host_is_summed_once_for_each(sizes: tuple[int, ...]) -> None:
    host_of = [host for host, size in enumerate(sizes) for _ in range(size)]
    shapes, dtypes = [(), (5,), (40, 30)], ("float32", "float64", "float32")

    def given(rank: int) -> list[np.ndarray]:
        return [np.full(shape, 10.0 ** host_of[rank], dtype) for shape, dtype in zip(shapes, dtypes)]

    for result in on_hosts(sizes, lambda sums, rank: sums.sum_over_hosts(given(rank))):
        for one, shape, dtype in zip(result, shapes, dtypes):
            expected = np.full(shape, sum(10.0**host for host in range(len(sizes))), dtype)
            assert one.dtype == dtype
            np.testing.assert_array_equal(one, expected)


def test_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0"])
    with pytest.raises(OptionError, match="hierarchical.*must have no GPUs"):
        multiworker._communication_options("hierarchical", 1.0)
    assert shared_host.offer("auto", "Average").listener is None


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Collective ops is aborted by: /job:worker/task:1 stopped sending heartbeats", LostPeer("rank 1")),
        ("Collective ops is aborted by: Collective has timed out: 8 seconds", TimedOut("Collective has timed out")),
        ("Collective ops is aborted by: Shape mismatch in the collective", Mismatch("Shape mismatch")),
        ("Collective ops is aborted by: Error reported: Collective over shared memory aborted by: rank 3 has left. "
         "Connection closed by peer", LostPeer("rank 3")),
    ],
)  # fmt: skip
def test_the_ranks_of_a_host_are_told_what_tensorflow_tells_one(
    message: str, told: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_errors, "detect_cluster", lambda: cluster(4))
    monkeypatch.setattr(peer_errors.private_collectives, "tell_other_workers", lambda message: None)
    heard: list[Exception] = []
    monkeypatch.setattr(peer_errors, "_tell_host", heard.append)
    assert peer_errors.explained(tf.errors.UnavailableError(None, None, message)) is not None
    assert [(type(one), str(one).startswith(str(told))) for one in heard] == [(type(told), True)]
