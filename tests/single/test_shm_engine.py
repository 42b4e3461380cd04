"""The engine behind `communication="shm"`: what ranks get, in any order, of any size, and when one of them is gone."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from shm_ranks import DEADLINE_S, begin, engines, together

from tfdistkit.collectives.shm import engine, messages, peers
from tfdistkit.collectives.shm.engine import CHUNK_BYTES, Engine
from tfdistkit.collectives.shm.messages import LostPeer, Mismatch, TimedOut
from tfdistkit.collectives.shm.operation import AllToAll, Broadcast, Gather, Sum
from tfdistkit.errors import RendezvousError

# Around what travels through the sockets (32 KiB), a chunk (1 MiB), and several chunks, in float32.
SIZES = [0, 1, 8191, 8192, 8193, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, 1_000_003]


@pytest.fixture(params=[2, 3, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    with engines(request.param) as running:
        yield running


@pytest.fixture
def pair() -> Iterator[list[Engine]]:
    with engines(2) as running:
        yield running


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_is_that_of_one_order_of_additions(ranks: list[Engine], size: int) -> None:
    numbers = np.random.default_rng(size)
    given = [numbers.normal(size=size).astype("float32") for _ in ranks]
    expected = given[0]
    for one in given[1:]:
        expected = expected + one
    for [summed] in together(ranks, Sum, lambda rank: ([given[rank]],)):
        np.testing.assert_array_equal(summed, expected)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "int64"])
def test_sums_of_several_arrays_keep_shapes_and_dtypes(ranks: list[Engine], dtype: str) -> None:
    numbers = np.random.default_rng(1)
    shapes = [(), (0, 4), (3, 5), (700, 1000), (1,), (2, 0), (400_000,), (7,)]
    given = [[np.asarray(numbers.normal(size=shape) * 9).astype(dtype) for shape in shapes] for _ in ranks]
    for summed in together(ranks, Sum, lambda rank: (given[rank],)):
        for i, shape in enumerate(shapes):
            expected = given[0][i]
            for one in given[1:]:
                expected = np.add(expected, one[i], dtype=dtype)
            assert (summed[i].shape, summed[i].dtype) == (shape, np.dtype(dtype))
            np.testing.assert_array_equal(summed[i], expected)


def test_infinite_and_missing_numbers_are_summed(pair: list[Engine]) -> None:
    given = [np.full(20_000, value, "float32") for value in (np.finfo("float32").max, np.finfo("float32").max)]
    given[1][0] = np.nan
    for [summed] in together(pair, Sum, lambda rank: ([given[rank]],)):
        assert np.isnan(summed[0]) and np.isinf(summed[1:]).all()


@pytest.mark.parametrize("rows", [(0, 0, 0, 0, 0), (3, 0, 1, 2, 5), (200_000, 1, 0, 70_000, 3)])
def test_gathers_of_any_number_of_rows(ranks: list[Engine], rows: tuple[int, ...]) -> None:
    given = [np.random.default_rng(rank).normal(size=(rows[rank], 3)) for rank in range(len(ranks))]
    for [gathered] in together(ranks, Gather, lambda rank: (given[rank],)):
        np.testing.assert_array_equal(gathered, np.concatenate(given))
    for [gathered] in together(ranks, Gather, lambda rank: (np.zeros((rows[rank], 0)),)):
        assert gathered.shape == (sum(rows[: len(ranks)]), 0)


@pytest.mark.parametrize("size", [0, 5, 700_000])
def test_a_broadcast_from_each_rank(ranks: list[Engine], size: int) -> None:
    for root in range(len(ranks)):
        given = [np.random.default_rng(rank).normal(size=(1, size)) for rank in range(len(ranks))]
        waits = [begin(one, Broadcast, given[one.rank], root, one.rank == root) for one in ranks]
        for [received] in [wait() for wait in waits]:
            np.testing.assert_array_equal(received, given[root])


@pytest.mark.parametrize("most", [1, 4, 90_000])
def test_an_all_to_all_of_any_splits(ranks: list[Engine], most: int) -> None:
    size = len(ranks)
    splits = np.random.default_rng(most).integers(0, most, size=(size, size))
    given = [np.random.default_rng(rank).normal(size=(splits[rank].sum(), 2)) for rank in range(size)]
    results = together(ranks, AllToAll, lambda rank: (given[rank], splits[rank].tolist()))
    for rank, (received, counts) in enumerate(results):
        ends = splits.cumsum(1)
        parts = [given[r][ends[r, rank] - splits[r, rank] : ends[r, rank]] for r in range(size)]
        np.testing.assert_array_equal(received, np.concatenate(parts))
        np.testing.assert_array_equal(counts, splits[:, rank])


def test_ranks_call_in_any_order_and_from_many_threads(ranks: list[Engine]) -> None:
    numbers = 12
    results: dict[tuple[int, int], np.ndarray] = {}

    def run(one: Engine, number: int) -> None:
        for turn in range(5):
            given = np.full(400_000 if number % 2 else 6, one.rank + number + turn, "float32")
            [summed] = begin(one, Sum, [given], tag=number)()
            results[one.rank, number] = summed if turn in (0, 4) else results[one.rank, number]

    threads = [threading.Thread(target=run, args=(one, number)) for one in ranks for number in range(numbers)]
    np.random.default_rng(0).shuffle(threads)  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for (_, number), summed in results.items():
        assert (summed == sum(rank + number + 4 for rank in range(len(ranks)))).all()
    assert len(results) == numbers * len(ranks)


def test_other_shapes_are_an_error_on_all_ranks_and_the_next_call_works(ranks: list[Engine]) -> None:
    waits = [begin(one, Sum, [np.zeros(40_000 + one.rank, "float32")]) for one in ranks]
    for wait in waits:
        with pytest.raises(Mismatch, match=r"rank 0: sum of float32 \[40000\]; rank 1: sum of float32 \[40001\]"):
            wait()
    assert [summed[0][0] for summed in together(ranks, Sum, lambda rank: ([np.ones(3)],))] == [len(ranks)] * len(ranks)


def test_ranks_that_wait_in_other_operations_are_told(ranks: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_APART_S", 1.0)
    waits = [begin(one, Sum, [np.zeros(one.rank + 2)], tag=one.rank % 2) for one in ranks]
    for wait in waits:
        with pytest.raises(Mismatch, match=r"rank 0: sum of float64 \[2\]; rank 1: sum of float64 \[3\]"):
            wait()


def test_a_rank_that_only_takes_its_time_is_waited_for(ranks: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_APART_S", 1.0)
    waits = [begin(one, Sum, [np.zeros(2)], tag=tag) for one in ranks[1:] for tag in (1, 2)]
    time.sleep(2.5)
    waits += [begin(ranks[0], Sum, [np.ones(2)], tag=tag) for tag in (2, 1)]
    assert all((wait()[0] == 1).all() for wait in waits)


def test_a_thread_that_waits_for_a_sum_stops_no_rank(ranks: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_APART_S", 1.0)
    waits = [begin(ranks[0], Sum, [np.ones(2)], tag=1, timeout_s=math.inf)]
    waits += [begin(one, Sum, [np.ones(2)], tag=2) for one in ranks[1:]]
    time.sleep(2.5)
    waits.append(begin(ranks[0], Sum, [np.ones(2)], tag=2))
    waits += [begin(one, Sum, [np.ones(2)], tag=1, timeout_s=math.inf) for one in ranks[1:]]
    assert all((wait()[0] == len(ranks)).all() for wait in waits)


@pytest.mark.parametrize("size", [3, 3_000_000])
def test_a_lost_rank_is_named_at_once_by_all_others(ranks: list[Engine], size: int) -> None:
    lost = len(ranks) - 1
    waits = [begin(one, Sum, [np.zeros(size)]) for one in ranks[:lost]]
    start = time.monotonic()
    ranks[lost].close()
    for wait in waits:
        with pytest.raises(LostPeer, match=f"rank {lost}"):
            wait()
    assert time.monotonic() - start < 10  # Far below the timeout of 60 s.
    with pytest.raises(LostPeer, match=f"rank {lost}"):
        begin(ranks[0], Sum, [np.zeros(size)])()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_lost_in_the_middle_of_a_sum_is_named(pair: list[Engine], lost: int) -> None:
    waits = [begin(one, Sum, [np.ones(40_000_000)]) for one in pair]  # 320 MB: some tenths of a second.
    while not pair[1 - lost]._steps:
        time.sleep(0.001)
    pair[lost].close()
    with pytest.raises(LostPeer, match=f"rank {lost}"):
        waits[1 - lost]()
    with pytest.raises(LostPeer):
        waits[lost]()


def test_the_loss_of_rank_0_is_seen_by_all(ranks: list[Engine]) -> None:
    waits = [begin(one, Gather, np.zeros(4)) for one in ranks[1:]]
    ranks[0].close()
    for wait in waits:
        with pytest.raises(LostPeer, match="rank 0"):
            wait()


def test_a_rank_may_leave_after_its_last_operation(ranks: list[Engine]) -> None:
    for _ in range(20):
        together(ranks, Sum, lambda rank: ([np.zeros(500_000)],))
    waits = [begin(one, Sum, [np.ones(500_000)]) for one in ranks]
    waits[-1]()
    ranks[-1].close()
    for wait in waits[:-1]:
        assert (wait()[0] == len(ranks)).all()


@pytest.mark.parametrize("absent", [0, 1])
def test_an_absent_rank_is_named_after_the_timeout(pair: list[Engine], absent: int) -> None:
    start = time.monotonic()
    with pytest.raises(TimedOut, match=f"1 seconds for rank {absent}"):
        begin(pair[1 - absent], Sum, [np.zeros(9)], timeout_s=1)()
    assert time.monotonic() - start > 0.9
    with pytest.raises(TimedOut, match=f"rank {absent}"):  # Now or later, the ranks are out of step.
        begin(pair[absent], Sum, [np.zeros(9)])()


def test_a_stop_of_the_whole_process_is_no_timeout(pair: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    wait = begin(pair[0], Sum, [np.zeros(9)], timeout_s=20)
    time.sleep(0.3)
    actual = time.monotonic
    jump = actual() + 1
    monkeypatch.setattr(time, "monotonic", lambda: actual() + (3600 if actual() > jump else 0))
    time.sleep(2.5)  # The clock goes on by an hour within a turn of the thread, as after Ctrl-Z.
    begin(pair[1], Sum, [np.zeros(9)], timeout_s=20)
    assert (wait()[0] == 0).all()


def test_a_forked_child_is_told_that_it_is_no_rank(pair: list[Engine]) -> None:
    child = os.fork()
    if not child:
        ended = threading.Event()
        operation = Sum(0, [np.ones(3)], DEADLINE_S, ended.set)
        pair[0].call(operation)
        os._exit(0 if ended.is_set() and isinstance(operation.error, LostPeer) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all((summed == 2).all() for [summed] in together(pair, Sum, lambda rank: ([np.ones(3)],)))


def test_nothing_is_left() -> None:
    def things() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def use() -> None:
        with engines(3) as running:
            together(running, Sum, lambda rank: ([np.zeros(600_000)],))

    use()
    before = things()
    for _ in range(3):
        use()
    assert things() == before


def test_a_rank_that_does_not_come_is_named() -> None:
    listener, absent = peers.Listener(), peers.Listener()
    facts = [{peers.FACT: listener.place}, {peers.FACT: absent.place}]
    with pytest.raises(RendezvousError, match="rank 1 is missing"):
        peers.connect(listener, 0, facts, 0.3)
    absent.close()


def test_ranks_of_another_host_share_none() -> None:
    listener = peers.listen()
    assert listener is not None
    host = listener.place.split()[0]
    own = {peers.FACT: listener.place}
    assert peers.ranks_of_hosts([own, {peers.FACT: f"{host} another"}]) == [[0, 1]]
    assert peers.ranks_of_hosts([own, {peers.FACT: "1 another"}]) == [[0], [1]]
    assert peers.ranks_of_hosts([own, {}]) == peers.ranks_of_hosts([{}, {}]) == [[0], [1]]
    listener.close()


def test_messages_arrive_whole_however_they_are_cut() -> None:
    one, other = socket.socketpair()
    sender, receiver = messages.Connection(one), messages.Connection(other)
    bodies = [os.urandom(n) for n in (0, 1, 3_000_000, 17)]
    for count, body in enumerate(bodies):
        sender.send(messages.POST, (2**63 + count, count), body)
    received: list = []
    while len(received) < len(bodies):
        sender.flush()
        received += receiver.receive()
    assert received == [(messages.POST, (2**63 + count, count), body) for count, body in enumerate(bodies)]
    one.close()
    assert receiver.receive() == [] and not receiver.is_open
    other.close()
