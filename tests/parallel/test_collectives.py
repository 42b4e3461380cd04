"""`tfdistkit.collectives` between real processes: values and gradients against NumPy, mistakes, deadlines."""

from __future__ import annotations

from pathlib import Path

import pytest
from collective_jobs import ENGINES, RunRanks, runner

pytestmark = pytest.mark.tensorflow


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    return runner(request)


# Each operation as NumPy does it for all ranks at once. What it gives for all of them, weighted, is one number;
# its numerical derivative by one rank's input is what the gradient on that rank has to be.
AGAINST_NUMPY = """
    import sys, tfdistkit
    strategy = tfdistkit.strategy(sys.argv[1], timeout_s=100)
    import numpy as np, tensorflow as tf
    from tfdistkit import collectives as c

    n, rank = strategy.num_replicas_in_sync, tfdistkit.rank()
    numbers = np.random.default_rng(7)
    even = [numbers.normal(size=(3 * n, 2)) for _ in range(n)]
    odd = [numbers.normal(size=(n + 2, 2)) for _ in range(n)]
    tied = [np.round(x) for x in even]
    uneven = [numbers.normal(size=(2 + r, 3)) for r in range(n)]
    across = [numbers.normal(size=(2, 3 - r)) for r in range(n)]
    splits = [[(r + to) % 3 for to in range(n)] for r in range(n)]
    rows = [numbers.normal(size=(sum(s), 2)) for s in splits]
    same = lambda f: lambda xs: [f(xs)] * n
    parts = lambda whole: np.array_split(whole, n)

    def send(xs, splits):
        pieces = [np.split(x, np.cumsum(s)[:-1]) for x, s in zip(xs, splits)]
        return [np.concatenate([pieces[r][to] for r in range(n)]) for to in range(n)]

    CASES = {
        "sum": (even, c.all_reduce, same(sum)),
        "average": (even, lambda x: c.all_reduce(x, "average"), same(lambda xs: sum(xs) / n)),
        "min": (even, lambda x: c.all_reduce(x, "min"), same(lambda xs: np.minimum.reduce(xs))),
        "max": (even, lambda x: c.all_reduce(x, op="max"), same(lambda xs: np.maximum.reduce(xs))),
        "group": (even, lambda x: tf.concat(c.grouped_all_reduce([x, 2 * x[0]]) [:1], 0), same(sum)),
        "gather": (uneven, c.all_gather, same(np.concatenate)),
        "gather_last": (across, lambda x: c.all_gather(x, axis=-1), same(lambda xs: np.concatenate(xs, 1))),
        "broadcast": (even, lambda x: c.broadcast(x, n - 1), same(lambda xs: xs[n - 1])),
        "scatter": (odd, c.reduce_scatter, lambda xs: parts(sum(xs))),
        "scatter_average": (odd, lambda x: c.reduce_scatter(x, "average"), lambda xs: parts(sum(xs) / n)),
        "scatter_max": (odd, lambda x: c.reduce_scatter(x, "max"), lambda xs: parts(np.maximum.reduce(xs))),
        "to_all": (even, c.all_to_all, lambda xs: send(xs, [[3] * n] * n)),
        "to_all_uneven": (rows, lambda x: c.all_to_all(x, splits[rank])[0], lambda xs: send(xs, splits)),
    }

    def weights(r, shape):
        return np.random.default_rng(r).normal(size=shape)

    def derivative(reference, xs):
        result = np.zeros_like(xs[rank])
        for place in np.ndindex(result.shape):
            for sign in (1, -1):
                moved = [x.copy() for x in xs]
                moved[rank][place] += sign * 1e-4
                ys = reference(moved)
                result[place] += sign * sum((weights(r, y.shape) * y).sum() for r, y in enumerate(ys)) / 2e-4
        return result

    def run(operation, x, weight):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(x)
            loss = tf.reduce_sum(y * weight)
        return y, tape.gradient(loss, x)

    def test(name, mode, xs, operation, reference):
        expected = reference(xs)[rank]
        x, weight = tf.constant(xs[rank]), tf.constant(weights(rank, expected.shape))
        call = lambda: run(operation, x, weight)
        inside = lambda: strategy.run(call)
        y, gradient = {"eager": call, "graph": tf.function(call), "eager replica": inside,
                       "graph replica": tf.function(inside)}[mode]()
        np.testing.assert_allclose(y, expected, atol=1e-12, err_msg=f"{name} {mode}")
        np.testing.assert_allclose(gradient, derivative(reference, xs), atol=1e-6, err_msg=f"gradient: {name} {mode}")

    for mode in ("eager", "graph", "eager replica", "graph replica"):
        for name, (xs, operation, reference) in CASES.items():
            test(name, mode, xs, operation, reference)
    with strategy.scope():
        test("in scope", "graph", *CASES["gather"])
    received = c.all_to_all(rows[rank], splits[rank])[1]
    assert received.numpy().tolist() == [splits[r][rank] for r in range(n)]

    # Two ranks share what both have.
    x = tf.constant([1.0, float(rank)])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = c.all_reduce(x, "max")
    assert tape.gradient(y, x).numpy().tolist() == [1.0, n * float(rank == n - 1)]

    # In branches and loops, with lengths that only the run knows.
    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)])
    def looped(x):
        total = tf.zeros([3], tf.float64)
        for _ in tf.range(3):
            if tf.shape(x)[1] == 3:
                total += tf.reduce_sum(c.all_gather(x), 0)
        return total
    np.testing.assert_allclose(looped(uneven[rank]), 3 * np.concatenate(uneven).sum(0))
    nothing = c.all_gather(tf.zeros([rank, 2]))
    assert nothing.shape == (n * (n - 1) // 2, 2)

    floats, integers = ("float16", "bfloat16", "float32"), ("int8", "int16", "int32", "int64")
    for dtype in (*floats, *integers, *("u" + name for name in integers)):
        x = tf.cast([3 + rank, 8], dtype)
        for result, expected in {
            "sum": (c.all_reduce(x), [sum(range(3, 3 + n)), 8 * n]),
            "average": (c.all_reduce(x, "average"), [sum(range(3, 3 + n)) // n, 8]),
            "min": (c.all_reduce(x, "min"), [3, 8]),
            "gather": (c.all_gather(x), [v for r in range(n) for v in (3 + r, 8)]),
            "broadcast": (c.broadcast(x, 1), [4, 8]),
        }.values():
            assert result.dtype.name == dtype
            if dtype in floats:
                assert abs(tf.cast(result, tf.float32).numpy() - np.array(expected)).max() < 0.6, (dtype, result)
            else:
                assert result.numpy().tolist() == expected, (dtype, result, expected)
    assert c.all_reduce([True, rank == 0], "min").numpy().tolist() == [True, False]
    assert c.all_reduce([False, rank == 0], "max").numpy().tolist() == [False, True]
    assert c.all_gather([rank == 1]).numpy().tolist() == [r == 1 for r in range(n)]
    assert c.all_gather(rank).numpy().tolist() == list(range(n))
    assert c.all_reduce(rank).numpy() == n * (n - 1) // 2
    assert c.grouped_all_reduce([]) == []
    together = c.grouped_all_reduce([1, [2.0], rank], "sum")
    assert [t.numpy().tolist() for t in together] == [n, [2.0 * n], n * (n - 1) // 2]
    odd_ones = tf.constant([np.inf, np.nan])
    np.testing.assert_array_equal(c.broadcast(odd_ones if rank == 0 else [0.0, 1.0]), odd_ones)

    given = {"rank": rank, "words": ["a" * rank], "none": None}
    for root in range(n):
        assert c.broadcast_object(given if rank == root else None, root_rank=root)["words"] == ["a" * root]
    assert c.broadcast_object(b"x" * 100_001)[-1:] == b"x"
    try:
        c.broadcast_object((lambda: 1) if rank == 0 else "ignored")
    except ValueError as error:
        assert "cannot be pickled" in str(error), error
    else:
        raise AssertionError("a lambda was pickled")
    c.barrier()
    strategy.run(tf.function(c.barrier))
    c.barrier(timeout_s=100)
    print("all as NumPy says")
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_values_and_gradients(run_ranks: RunRanks, engine: str, world_size: int, tmp_path: Path) -> None:
    for printed in run_ranks(engine, AGAINST_NUMPY, tmp_path, world_size):
        assert "all as NumPy says" in printed


MISMATCHES = """
    import sys, tfdistkit
    strategy = tfdistkit.strategy(sys.argv[1], timeout_s=60)
    import tensorflow as tf
    from tfdistkit import collectives as c
    rank = tfdistkit.rank()

    def fails(kind, call, *said):
        try:
            call()
        except kind as error:
            for words in ("The ranks do not call a collective with the same thing", *said):
                assert words in str(error), (words, str(error))
            return
        raise AssertionError(f"no error that says {said}")

    # The first calls of each kind are compared. An error leaves everything as it was.
    fails(ValueError, lambda: c.all_reduce(tf.ones([2, 3 + rank])), "rank 0: all_reduce sum: float32 [2, 3]",
          "rank 1: all_reduce sum: float32 [2, 4]")
    fails(ValueError, lambda: c.all_reduce(1.0 if rank else 1), "int32 []", "float32 []")
    fails(ValueError, lambda: c.all_gather(tf.ones([2 + rank, 3 + rank])), "float32 [*, 3]", "float32 [*, 4]")
    fails(ValueError, lambda: c.broadcast(1.0, root_rank=rank), "broadcast root_rank=1")
    fails(ValueError, lambda: c.reduce_scatter([1.0] * (1 + rank)), "[1]", "[2]")
    fails(ValueError, lambda: c.grouped_all_reduce([1.0] * (1 + rank)), "float32 []; float32 []")
    fails(ValueError, lambda: c.broadcast_object(1, root_rank=rank), "broadcast_object root_rank=1")
    if rank:
        fails(ValueError, lambda: c.all_to_all([1.0, 1.0]), "all_to_all")
    else:
        fails(ValueError, lambda: c.barrier(), "barrier")

    # In a graph too, while it runs: it was traced when all was well.
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def gathered(x):
        return c.all_gather(x)
    assert gathered(tf.ones([1 + rank, 2])).shape == (3, 2)
    fails(tf.errors.InvalidArgumentError, lambda: gathered(tf.ones([2, 3 + rank])), "float32 [*, 3]", "float32 [*, 4]")
    inside = tf.function(lambda x: strategy.run(c.all_reduce, args=(x,)))
    c.check(True)
    for _ in range(4):
        assert inside(tf.ones([2]))[0] == 2.0
    fails(tf.errors.InvalidArgumentError, lambda: inside(tf.ones([2 + rank])), "float32 [2]", "float32 [3]")
    many = [tf.ones([3, 4, 5])] * 60 + [tf.ones([1 + rank])]
    fails(ValueError, lambda: c.grouped_all_reduce(many), "float32 [3, 4, 5]")  # What is cut off is compared too.

    # Ranks that trace anew at other times than others are no mismatch.
    @tf.function
    def traced(x):
        return c.all_gather(x)
    for step in range(4):
        assert traced(tf.ones([1 + step * rank, 2])).shape == (2 + step, 2)
    c.check(None)
    assert gathered(tf.ones([4, 2])).shape == (8, 2)

    # Later calls are compared by the transport, which tells less.
    try:
        c.all_reduce(tf.ones([2, 3 + rank]))
    except tf.errors.OpError as error:
        assert "TFDISTKIT_CHECK_COLLECTIVES=1" in str(error), error
    else:
        raise AssertionError("no error")
    print("all seen")
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_mismatches_are_errors_on_every_rank(run_ranks: RunRanks, engine: str, tmp_path: Path) -> None:
    for printed in run_ranks(engine, MISMATCHES, tmp_path):
        assert "all seen" in printed


ONE_STAYS_AWAY = """
    import os, sys, time, tfdistkit
    strategy = tfdistkit.strategy(sys.argv[1], timeout_s=60)
    import tensorflow as tf
    from tfdistkit import collectives as c
    c.barrier()
    if tfdistkit.rank() == 0:
        started = time.monotonic()
        try:
            c.barrier(timeout_s=3)
        except tf.errors.DeadlineExceededError as error:
            assert "did not join" in str(error), error
        else:
            raise AssertionError("nobody else came, and the barrier opened")
        assert time.monotonic() - started < 40, "the strategy's time, not the barrier's"
        print("gave up")
        open("gave_up", "w").close()
    else:
        while not os.path.exists("gave_up"):
            time.sleep(0.1)
        print("stayed away")
    sys.stdout.flush()
    os._exit(0)  # TensorFlow and Horovod would wait for each other.
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_barrier_gives_up(run_ranks: RunRanks, engine: str, tmp_path: Path) -> None:
    first, second = run_ranks(engine, ONE_STAYS_AWAY, tmp_path)
    assert "gave up" in first
    assert "stayed away" in second


TRACED_AT_OTHER_TIMES = """
    import sys, tfdistkit
    strategy = tfdistkit.strategy(sys.argv[1])
    import tensorflow as tf
    rank = tfdistkit.rank()

    @tf.function
    def total(x):  # Of a number that is a constant of the graph, as the strategies sum their rows.
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(float(x.shape[0])))

    for step in range(4):
        rows = 2 + 2 * step * rank  # Rank 1 traces in each step, rank 0 in the first.
        assert float(strategy.run(total, args=(tf.ones([rows, 1]),))) == 4.0 + 2 * step
    print("the sum of now")
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sum_of_constants_is_no_constant(run_ranks: RunRanks, engine: str, tmp_path: Path) -> None:
    for printed in run_ranks(engine, TRACED_AT_OTHER_TIMES, tmp_path):
        assert "the sum of now" in printed


PROCESS_SETS = """
    import sys, tfdistkit
    strategy = tfdistkit.strategy("horovod")
    import tensorflow as tf
    from tfdistkit import collectives as c
    rank = tfdistkit.rank()
    ends, all_of_them = c.ProcessSet([2, 0]), c.ProcessSet(range(3))
    assert (ends.ranks, ends.size, ends.included) == ((0, 2), 2, rank != 1)

    def work(x):
        results = []
        if ends.included:
            place = ends.ranks.index(rank)
            results += [c.all_gather(x, process_set=ends), c.all_reduce(x, "average", ends), c.broadcast(x, 1, ends)]
            results += [c.all_to_all(tf.repeat(x, 2, 0), process_set=ends)]
        return [*results, c.all_reduce(x), c.all_gather(x, process_set=all_of_them)]

    x = tf.constant([[1.0 + rank]])
    graph = tf.function(work)
    for function in (work, graph, graph, graph, graph, work, work, work):
        *in_set, total, everybody = [t.numpy().ravel().tolist() for t in function(x)]
        assert total == [6.0] and everybody == [1.0, 2.0, 3.0]
        assert in_set == ([[1.0, 3.0], [2.0], [3.0], [1.0, 3.0]] if ends.included else [])
    if ends.included:
        assert c.broadcast_object(rank, 1, ends) == 2
        c.barrier(process_set=ends)
    for wrong in ([], [0, 0], [3], ["0"], [-1, 1]):
        try:
            c.ProcessSet(wrong)
        except ValueError as error:
            assert "0 to 2" in str(error)
        else:
            raise AssertionError(wrong)
    c.barrier()
    print("sets work")
"""


@pytest.mark.horovod
def test_process_sets(run_ranks: RunRanks, tmp_path: Path) -> None:
    for printed in run_ranks("horovod", PROCESS_SETS, tmp_path, 3, HOROVOD_DYNAMIC_PROCESS_SETS="1"):
        assert "sets work" in printed
