"""The exchange between the ranks of one host: all ranks get the same rows, or none does."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import longer

from tfdistkit.cluster import local_exchange
from tfdistkit.cluster.local_exchange import Listener, LocalExchange, connect

DEADLINE_S = 60
Ranks = list[LocalExchange]


def connected(size: int) -> Ranks:
    listener = Listener()
    with ThreadPoolExecutor(size) as pool:
        first = pool.submit(listener.accept, size)
        others = [pool.submit(connect, listener.token, rank) for rank in range(1, size)]
        return [one.result(DEADLINE_S) for one in (first, *others)]


@pytest.fixture
def three() -> Iterator[Ranks]:
    ranks = connected(3)
    yield ranks
    for one in ranks:
        one.close()


def at_once(ranks: Ranks, *calls: Callable[[LocalExchange], object]) -> list[object]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [one.result(DEADLINE_S) for one in [pool.submit(call, rank) for call, rank in zip(calls, ranks)]]


def gather(row: bytes, after_s: float = 0) -> Callable[[LocalExchange], object]:
    def run(one: LocalExchange) -> object:
        time.sleep(after_s)
        return one.gather(row)

    return run


def test_all_ranks_get_the_rows_in_order(three: Ranks) -> None:
    for _ in range(3):
        assert at_once(three, gather(b"a0"), gather(b"b1"), gather(b"c2")) == [[b"a0", b"b1", b"c2"]] * 3


@pytest.mark.parametrize("late", range(3))
def test_a_late_rank_makes_all_use_the_collective(three: Ranks, late: int) -> None:
    after = [0.0, 0.0, 0.0]
    after[late] = 4 * local_exchange._JOIN_S
    assert at_once(three, *(gather(b"x", one) for one in after)) == [None] * 3
    assert at_once(three, *[gather(b"y")] * 3) == [[b"y"] * 3] * 3, "the next round is in step again"


def test_rows_of_different_lengths_make_all_use_the_collective(three: Ranks) -> None:
    """The collective detects that the ranks run different steps."""
    assert at_once(three, gather(b"x"), gather(b"x"), gather(b"xx")) == [None] * 3
    assert at_once(three, *[gather(b"y")] * 3) == [[b"y"] * 3] * 3


@pytest.mark.parametrize("gone", range(3))
def test_a_lost_rank_makes_the_others_use_the_collective(three: Ranks, gone: int) -> None:
    three[gone].close()
    left = [one for one in three if one is not three[gone]]
    since = time.monotonic()
    # Without rank 0, both lose their connection; otherwise rank 0 detects it, and closes the other connection.
    assert at_once(left, *[gather(b"x")] * 2) == [None] * 2
    assert at_once(left, *[gather(b"x")] * 2) == [None] * 2
    assert time.monotonic() - since < longer(10)


def test_a_rank_that_stops_before_its_vote(three: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_exchange, "_VOTE_S", 0.3)
    one, two, stopped = three
    stopped._peers[0].send(local_exchange._ROW, 1, b"x")
    assert at_once([one, two], gather(b"x"), gather(b"x")) == [None] * 2
    assert stopped.gather(b"x") is None, "once it runs again, it uses the collective, too"


def test_all_ranks_take_the_same_decision_whatever_their_delay() -> None:
    """Delays near the timeout, where one rank gives up just as another one joins."""
    chance = random.Random(7)
    rounds = 60
    limit = local_exchange._JOIN_S
    delays = [[chance.choice([0, 0, limit * chance.uniform(0.9, 1.1)]) for _ in range(3)] for _ in range(rounds)]
    ranks = connected(3)
    start = threading.Barrier(3)

    def run(rank: int) -> list[object]:
        found = []
        for number, delay in enumerate(delays):
            start.wait(DEADLINE_S)
            time.sleep(delay[rank])
            found.append(ranks[rank].gather(b"%d %04d" % (rank, number)))
        return found

    with ThreadPoolExecutor(3) as pool:
        results = [one.result(DEADLINE_S) for one in [pool.submit(run, rank) for rank in range(3)]]
    assert results[0] == results[1] == results[2]
    agreed = [(number, rows) for number, rows in enumerate(results[0]) if rows is not None]
    assert 5 < len(agreed) < rounds, "both outcomes were tried"
    assert all(rows == [b"%d %04d" % (rank, number) for rank in range(3)] for number, rows in agreed)
    for one in ranks:
        one.close()


def names() -> str:
    return Path("/proc/net/unix").read_text(encoding="ascii", errors="replace")


def test_another_program_is_not_taken_for_a_rank() -> None:
    """It may read the name of the socket, but not the token; what it sends is bounded, and it cannot end the job."""
    listener = Listener()
    address = local_exchange._address(listener.token)
    assert listener.token.hex() not in names() and address[1:].decode() in names()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(listener.accept, 2)
        strangers = []
        for said in (b"", b"\xff" * 40, local_exchange._HEADER.pack(0, 1, 24) + bytes(24)):
            one = socket.socket(socket.AF_UNIX)
            one.connect(address)
            one.sendall(said)
            strangers.append(one)
        strangers[0].close()
        second = connect(listener.token, 1)
        ranks = [first.result(DEADLINE_S), second]
    assert at_once(ranks, gather(b"a"), gather(b"b")) == [[b"a", b"b"]] * 2
    with pytest.raises(OSError):
        connect(listener.token, 2)  # No other connection is accepted.
    for end in (*strangers, *ranks):
        end.close()


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    monkeypatch.setattr(local_exchange, "_CONNECT_S", 0.5)
    own = os.getuid()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(local_exchange._Connection, "user", lambda _: own + 1)
        first = pool.submit(listener.accept, 2)
        try:
            second = connect(listener.token, 1)
        except OSError:
            pass  # It was refused while it sent its token.
        else:
            assert second.gather(b"x") is None
        with pytest.raises(OSError):
            first.result(DEADLINE_S)


def test_the_timeout_for_a_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_exchange, "_CONNECT_S", 0.2)
    with pytest.raises(OSError):
        Listener().accept(2)
    with pytest.raises(OSError):
        connect(b"x" * local_exchange.TOKEN_BYTES, 1)
