"""What the ranks of a host do together: sums of arrays, and moves of their bytes from rank to rank.

Small operations travel through the sockets, by way of rank 0. Large ones go through the shared memory, in chunks, in
steps that all ranks take together (`Engine`). A rank writes a chunk in one step; the others read it in the next ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tfdistkit.collectives.shm.pieces import Pieces, empty

# Called with the memory of a rank and the number of a step: the bytes that the rank wrote in this step.
Chunks = Callable[[int, int], np.ndarray]


class Operation:
    """An operation of all ranks; a subclass says what is done.

    Args:
        tag: A number that tells operations apart that may be under way at the same time, equal on all ranks.
        call: A line that must be equal on all ranks: the operation, its dtype and its shapes.
        meta: What the others have to know of this rank's data; int64.
        nbytes: The size of this rank's data.
        timeout_s: Seconds that it may wait for the other ranks.
        on_end: Called without arguments when there is a result or an error, in the thread of the engine.

    Attributes:
        result: The arrays of the result, once it has ended.
        error: The error it ended with, if any.
        steps: How many steps it takes through the shared memory, once it has begun.
    """

    def __init__(
        self, tag: int, call: bytes, meta: Sequence[int], nbytes: int, timeout_s: float, on_end: Callable[[], None]
    ):
        self.tag, self.call, self.meta = tag, call, np.array(meta, np.int64)
        self.nbytes, self.timeout_s, self.on_end = nbytes, timeout_s, on_end
        self.result: list[np.ndarray] = []
        self.error: Exception | None = None
        self.steps = 0

    def data(self) -> bytes:
        """Returns this rank's data, to be sent."""
        raise NotImplementedError

    def replies(self, metas: list[np.ndarray], data: list[bytes]) -> list[bytes]:
        """Returns what each rank gets, from what all have sent."""
        raise NotImplementedError

    def take(self, rank: int, metas: list[np.ndarray], reply: bytes) -> None:
        """Makes the result of what was sent back."""
        raise NotImplementedError

    def begin(self, rank: int, metas: list[np.ndarray], chunk_bytes: int) -> None:
        """Prepares the steps through the shared memory."""
        raise NotImplementedError

    def step(self, number: int, chunks: Chunks) -> None:
        """Takes a step.

        Args:
            number: The number of the step, from 0.
            chunks: Returns the bytes of a rank that were written in a step: this one, or one of the two before.
        """
        raise NotImplementedError


class Sum(Operation):
    """Adds arrays over the ranks, in the order of the ranks, so that all have the same bits.

    A chunk is written in one step, each rank sums its share of it in the next, and all collect the shares in the third.
    Of two ranks each sums the whole chunk in the second step: there is no third to wait for, and fewer bytes move.

    Args:
        tag: See `Operation`, as for the others.
        arrays: This rank's arrays, C-contiguous and of one dtype.
        timeout_s: See `Operation`.
        on_end: See `Operation`.
    """

    name = "sum"

    def __init__(self, tag: int, arrays: Sequence[np.ndarray], timeout_s: float, on_end: Callable[[], None]):
        self._dtype, self._shapes = arrays[0].dtype, [array.shape for array in arrays]
        call = f"{self.name} of {self._dtype.name} {', '.join(str(list(shape)) for shape in self._shapes)}".encode()
        super().__init__(tag, call, [], sum(array.nbytes for array in arrays), timeout_s, on_end)
        self._own = Pieces(arrays)

    def data(self) -> bytes:
        return self._own.joined()

    def replies(self, metas: list[np.ndarray], data: list[bytes]) -> list[bytes]:
        total = np.array(np.frombuffer(data[0], self._dtype))
        for one in data[1:]:
            np.add(total, np.frombuffer(one, self._dtype), out=total)
        return [total.tobytes()] * len(data)

    def take(self, rank: int, metas: list[np.ndarray], reply: bytes) -> None:
        flat, at = np.frombuffer(reply, self._dtype), 0
        for shape in self._shapes:
            size = math.prod(shape)
            self.result.append(flat[at : at + size].reshape(shape))
            at += size

    def begin(self, rank: int, metas: list[np.ndarray], chunk_bytes: int) -> None:
        self._rank, self._ranks = rank, len(metas)
        self._length = chunk_bytes // self._dtype.itemsize
        self._chunks = -(-self._own.size // self._length)
        self.steps = self._chunks + (1 if self._ranks == 2 else 2)
        self.result = self._make_result(rank)
        self._total = Pieces(self.result)

    def _make_result(self, rank: int) -> list[np.ndarray]:
        return [empty(shape, self._dtype) for shape in self._shapes]

    def step(self, number: int, chunks: Chunks) -> None:
        if number < self._chunks:
            first, last = self._range(number)
            self._own.read(first, last, self._view(chunks, self._rank, number, last - first))
        if self._ranks == 2:
            if number >= 1:
                self._sum_pair(number - 1, chunks)
            return
        if 0 <= number - 1 < self._chunks:
            self._sum_share(number - 1, chunks)
        if number >= 2:
            self._collect(number - 2, chunks)

    def _sum_pair(self, number: int, chunks: Chunks) -> None:
        first, last = self._range(number)
        views = [self._view(chunks, rank, number, last - first) for rank in range(2)]
        self._total.add(first, last, *views)

    def _collect(self, number: int, chunks: Chunks) -> None:
        first, last = self._range(number)
        for rank in range(self._ranks):
            begin, end = self._share(rank, last - first)
            view = self._view(chunks, rank, number, last - first)
            self._total.write(first + begin, first + end, view[begin:end])

    def _sum_share(self, number: int, chunks: Chunks) -> None:
        first, last = self._range(number)
        begin, end = self._share(self._rank, last - first)
        views = [self._view(chunks, rank, number, last - first)[begin:end] for rank in range(self._ranks)]
        # In the order of the ranks. No other rank reads this part of this rank's chunk before the next step.
        total = np.add(views[0], views[1], out=views[self._rank] if self._rank < 2 else None)
        for view in views[2:]:
            np.add(total, view, out=total)
        if self._rank >= 2:
            np.copyto(views[self._rank], total)

    def _range(self, number: int) -> tuple[int, int]:
        return number * self._length, min((number + 1) * self._length, self._own.size)

    def _share(self, rank: int, length: int) -> tuple[int, int]:
        return rank * length // self._ranks, (rank + 1) * length // self._ranks

    def _view(self, chunks: Chunks, rank: int, number: int, length: int) -> np.ndarray:
        return chunks(rank, number)[: length * self._dtype.itemsize].view(self._dtype)


class SumOnFirst(Sum):
    """Adds arrays as `Sum` does, for rank 0 only.

    The result is one flat array: the sums of all arrays, one after the other. The other ranks get one of no elements.
    """

    name = "sum on the first"

    def replies(self, metas: list[np.ndarray], data: list[bytes]) -> list[bytes]:
        return [super().replies(metas, data)[0], *[b""] * (len(data) - 1)]

    def take(self, rank: int, metas: list[np.ndarray], reply: bytes) -> None:
        self.result = [np.frombuffer(reply, self._dtype)]

    def _make_result(self, rank: int) -> list[np.ndarray]:
        return [empty([0 if rank else self._own.size], self._dtype)]

    def _collect(self, number: int, chunks: Chunks) -> None:
        if self._rank == 0:
            super()._collect(number, chunks)

    def _sum_pair(self, number: int, chunks: Chunks) -> None:
        if self._rank == 0:
            super()._sum_pair(number, chunks)


class Move(Operation):
    """Carries rows from rank to rank; a subclass says which.

    A chunk is written in one step, and collected in the next.

    Args:
        tag: See `Operation`, as for the others.
        name: What the operation is called.
        meta: See `Operation`.
        array: This rank's rows, C-contiguous.
        timeout_s: See `Operation`.
        on_end: See `Operation`.
    """

    def __init__(
        self,
        tag: int,
        name: str,
        meta: Sequence[int],
        array: np.ndarray,
        timeout_s: float,
        on_end: Callable[[], None],
    ):
        self._dtype, self._row = array.dtype, array.shape[1:]
        self._row_bytes = array.dtype.itemsize * math.prod(self._row)
        call = f"{name} of {array.dtype.name} [{', '.join(['*', *map(str, self._row)])}]".encode()
        super().__init__(tag, call, meta, array.nbytes, timeout_s, on_end)
        self._bytes: np.ndarray = array.reshape(-1).view(np.uint8)

    def rows(self, metas: list[np.ndarray], rank: int) -> list[tuple[int, int]]:
        """Returns which rows of each rank a rank gets: the first, and the one after the last."""
        raise NotImplementedError

    def data(self) -> bytes:
        return self._bytes.tobytes()

    def replies(self, metas: list[np.ndarray], data: list[bytes]) -> list[bytes]:
        wanted = [self._ranges(metas, rank) for rank in range(len(data))]
        return [b"".join(one[first:last] for one, (first, last) in zip(data, of)) for of in wanted]

    def take(self, rank: int, metas: list[np.ndarray], reply: bytes) -> None:
        self._make_result(rank, metas)
        np.copyto(self._target, np.frombuffer(reply, np.uint8))

    def begin(self, rank: int, metas: list[np.ndarray], chunk_bytes: int) -> None:
        self._rank, self._length = rank, chunk_bytes
        self._wanted = self._ranges(metas, rank)
        most = max(last for of in range(len(metas)) for _, last in self._ranges(metas, of))
        self.steps = -(-most // chunk_bytes) + 1
        self._begins = [0, *itertools.accumulate(last - first for first, last in self._wanted)]
        self._make_result(rank, metas)

    def step(self, number: int, chunks: Chunks) -> None:
        first = number * self._length
        own = self._bytes[first : first + self._length]
        np.copyto(chunks(self._rank, number)[: own.size], own)
        if number == 0:
            return
        first -= self._length
        for rank, (begin, end) in enumerate(self._wanted):
            low, high = max(begin, first), min(end, first + self._length)
            if low < high:
                place = self._begins[rank] + low - begin
                source = chunks(rank, number - 1)[low - first : high - first]
                np.copyto(self._target[place : place + high - low], source)

    def _ranges(self, metas: list[np.ndarray], rank: int) -> list[tuple[int, int]]:
        return [(first * self._row_bytes, last * self._row_bytes) for first, last in self.rows(metas, rank)]

    def _make_result(self, rank: int, metas: list[np.ndarray]) -> None:
        rows = sum(last - first for first, last in self.rows(metas, rank))
        self.result = [empty((rows, *self._row), self._dtype)]
        self._target: np.ndarray = self.result[0].reshape(-1).view(np.uint8)


class Gather(Move):
    """Concatenates the rows of all ranks, of which each may have another number."""

    def __init__(self, tag: int, array: np.ndarray, timeout_s: float, on_end: Callable[[], None]):
        super().__init__(tag, "gather", [len(array)], array, timeout_s, on_end)

    def rows(self, metas: list[np.ndarray], rank: int) -> list[tuple[int, int]]:
        return [(0, int(meta[0])) for meta in metas]


class Broadcast(Move):
    """Sends the array of one rank to all.

    Args:
        tag: See `Operation`, as for the others.
        array: An array of one shape on all ranks; its first dimension is 1.
        root: The rank that sends.
        is_root: Whether this is it.
        timeout_s: See `Operation`.
        on_end: See `Operation`.
    """

    def __init__(
        self, tag: int, array: np.ndarray, root: int, is_root: bool, timeout_s: float, on_end: Callable[[], None]
    ):
        self._root = root
        sent = array if is_root else array[:0]
        super().__init__(tag, f"broadcast from rank {root}", [len(sent)], sent, timeout_s, on_end)

    def rows(self, metas: list[np.ndarray], rank: int) -> list[tuple[int, int]]:
        return [(0, int(meta[0])) for meta in metas]


class AllToAll(Move):
    """Sends each rank its rows; the second result tells how many came from each.

    Args:
        tag: See `Operation`, as for the others.
        array: This rank's rows, those for rank 0 first.
        splits: How many of them each rank gets.
        timeout_s: See `Operation`.
        on_end: See `Operation`.
    """

    def __init__(
        self, tag: int, array: np.ndarray, splits: Sequence[int], timeout_s: float, on_end: Callable[[], None]
    ):
        super().__init__(tag, "all-to-all", splits, array, timeout_s, on_end)

    def rows(self, metas: list[np.ndarray], rank: int) -> list[tuple[int, int]]:
        firsts = [int(meta[:rank].sum()) for meta in metas]
        return [(first, first + int(meta[rank])) for first, meta in zip(firsts, metas)]

    def _make_result(self, rank: int, metas: list[np.ndarray]) -> None:
        super()._make_result(rank, metas)
        self.result.append(np.array([meta[rank] for meta in metas], np.int64))
