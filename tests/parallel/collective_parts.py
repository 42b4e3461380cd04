"""The code of the ranks in `test_collectives`: parts of a shared job."""

# For each way to call it: the results, and the gradients of a weighted loss.
EVERY_CASE = """
    import json
    import tensorflow as tf
    from collective_cases import CASES, inputs, weights
    from tfdistkit import collectives as c

    n = strategy.num_replicas_in_sync

    def group(x):
        total, first = c.grouped_all_reduce([x, 2 * x[0]])
        return total + first

    OPERATIONS = {
        "sum": c.all_reduce,
        "average": lambda x: c.all_reduce(x, "average"),
        "min": lambda x: c.all_reduce(x, "min"),
        "max": lambda x: c.all_reduce(x, op="max"),
        "group": group,
        "gather": c.all_gather,
        "gather_last": lambda x: c.all_gather(x, axis=-1),
        "broadcast": lambda x: c.broadcast(x, n - 1),
        "scatter": c.reduce_scatter,
        "scatter_average": lambda x: c.reduce_scatter(x, "average"),
        "scatter_max": lambda x: c.reduce_scatter(x, "max"),
        "to_all": c.all_to_all,
        "to_all_uneven": lambda x: c.all_to_all(x, inputs(n).splits[rank])[0],
    }

    def result_and_gradient(case, mode):
        field, reference = CASES[case]
        xs = getattr(inputs(n), field)
        x, weight = tf.constant(xs[rank]), tf.constant(weights(rank, reference(xs)[rank].shape))

        def call():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = OPERATIONS[case](x)
                loss = tf.reduce_sum(y * weight)
            return y, tape.gradient(loss, x)

        run = (lambda: strategy.run(call)) if "replica" in mode else call
        return (tf.function(run) if "graph" in mode else run)()

    found = {}
    for mode in ("eager", "graph", "eager replica", "graph replica"):
        for case in CASES:
            found[f"{case}, {mode}"] = [t.numpy().tolist() for t in result_and_gradient(case, mode)]
    with strategy.scope():
        found["gather, in scope"] = [t.numpy().tolist() for t in result_and_gradient("gather", "graph")]
    print(json.dumps(found))
"""

IN_LOOPS = """
    import json
    import tensorflow as tf
    from collective_cases import inputs
    from tfdistkit import collectives as c

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)])
    def looped(x):
        total = tf.zeros([3], tf.float64)
        for _ in tf.range(3):
            if tf.shape(x)[1] == 3:
                total += tf.reduce_sum(c.all_gather(x), 0)
        return total

    n = strategy.num_replicas_in_sync
    nothing = c.all_gather(tf.zeros([rank, 2]))
    received = c.all_to_all(inputs(n).rows[rank], inputs(n).splits[rank])[1]
    print(json.dumps([looped(inputs(n).uneven[rank]).numpy().tolist(), list(nothing.shape), received.numpy().tolist()]))
"""

# Two ranks with the same value share the gradient.
TIED = """
    import tensorflow as tf
    from tfdistkit import collectives as c

    x = tf.constant([1.0, float(rank)])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = c.all_reduce(x, "max")
    print(tape.gradient(y, x).numpy().tolist())
"""

DTYPES = """
    import numpy as np, tensorflow as tf
    from tfdistkit import collectives as c

    n = strategy.num_replicas_in_sync
    floats, integers = ("float16", "bfloat16", "float32", "float64"), ("int8", "int16", "int32", "int64")
    for dtype in (*floats, *integers, *("u" + name for name in integers)):
        x = tf.cast([3 + rank, 8], dtype)
        for result, expected in (
            (c.all_reduce(x), [sum(range(3, 3 + n)), 8 * n]),
            (c.all_reduce(x, "average"), [sum(range(3, 3 + n)) / n, 8]),
            (c.all_reduce(x, "min"), [3, 8]),
            (c.all_gather(x), [v for r in range(n) for v in (3 + r, 8)]),
            (c.broadcast(x, 1), [4, 8]),
        ):
            # Small numbers: each dtype holds them exactly, but for the average of integers, which is rounded down.
            expected = [v // 1 if dtype not in floats else v for v in expected]
            assert result.dtype.name == dtype
            assert tf.cast(result, tf.float64).numpy().tolist() == expected, (dtype, result, expected)
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
    print("every dtype")
"""

OBJECTS = """
    import tensorflow as tf
    from tfdistkit import collectives as c

    given = {"rank": rank, "words": ["a" * rank], "none": None}
    for root in range(strategy.num_replicas_in_sync):
        received = c.broadcast_object(given if rank == root else None, root_rank=root)
        assert received == {"rank": root, "words": ["a" * root], "none": None}
    assert c.broadcast_object(bytes(100_000) + b"x" if rank == 0 else None)[-2:] == b"\\0x"
    try:
        c.broadcast_object((lambda: 1) if rank == 0 else "ignored")
    except ValueError as error:
        assert "cannot be pickled" in str(error), error
    else:
        raise AssertionError("a lambda was pickled")
    c.barrier()
    strategy.run(tf.function(c.barrier))
    c.barrier(timeout_s=100)
    print("objects")
"""

# Setup of the parts about mistakes.
_FAILS = """
    import tensorflow as tf
    from tfdistkit import collectives as c

    def fails(kind, call, *said):
        try:
            call()
        except kind as error:
            for words in ("All ranks must make the same collective call", *said):
                assert words in str(error), (words, str(error))
            return
        raise AssertionError(f"no error that says {said}")
"""

# The first calls of each kind in a process are compared. After an error the ranks can go on.
FIRST_CALLS = (
    _FAILS
    + """
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
    print("all seen")
"""
)

# Also in a graph, at run time: it was traced with equal shapes.
IN_GRAPHS = (
    _FAILS
    + """
    c.check(True)

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def gathered(x):
        return c.all_gather(x)

    assert gathered(tf.ones([1 + rank, 2])).shape == (3, 2)
    fails(tf.errors.InvalidArgumentError, lambda: gathered(tf.ones([2, 3 + rank])), "float32 [*, 3]", "float32 [*, 4]")
    inside = tf.function(lambda x: strategy.run(c.all_reduce, args=(x,)))
    for _ in range(4):
        assert inside(tf.ones([2]))[0] == 2.0
    fails(tf.errors.InvalidArgumentError, lambda: inside(tf.ones([2 + rank])), "float32 [2]", "float32 [3]")
    many = [tf.ones([3, 4, 5])] * 60 + [tf.ones([1 + rank])]
    fails(ValueError, lambda: c.grouped_all_reduce(many), "float32 [3, 4, 5]")  # The truncated part is compared too.

    # Ranks that retrace at different calls are not a mismatch.
    @tf.function
    def traced(x):
        return c.all_gather(x)

    for step in range(4):
        assert traced(tf.ones([1 + step * rank, 2])).shape == (2 + step, 2)
    c.check(None)
    assert gathered(tf.ones([4, 2])).shape == (8, 2)
    print("all seen")
"""
)

# Calls that are not compared fail in the transport, whose error tells less.
OF_THE_TRANSPORT = """
    import tensorflow as tf
    from tfdistkit import collectives as c

    c.check(False)
    try:
        c.all_reduce(tf.ones([2, 3 + rank]))
    except tf.errors.OpError as error:
        # A rank whose neighbours sent the expected data only learns that its peers ended.
        seen = "TFDISTKIT_CHECK_COLLECTIVES=1" in str(error)
        assert seen or "no longer takes part" in str(error), error
    else:
        raise AssertionError("no error")
    c.check(None)
    print("seen" if seen else "left alone")
"""

ONE_STAYS_AWAY = """
    import os, time
    import tensorflow as tf
    from tfdistkit import collectives as c

    c.barrier()
    if rank == 0:
        started = time.monotonic()
        try:
            c.barrier(timeout_s=3)
        except tf.errors.DeadlineExceededError as error:
            assert "did not join" in str(error), error
        else:
            raise AssertionError("nobody else came, and the barrier opened")
        assert time.monotonic() - started < 60, "the strategy's time, not the barrier's"
        print("gave up")
        (folder / "gave_up").touch()
    else:
        print("stayed away")
    # Rank 0 goes last: without it TensorFlow would end rank 1.
    deadline, awaited = time.monotonic() + 200, folder / ("gave_up" if rank else "result.1.json")
    while not awaited.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
"""

# A sum of a graph constant, as the strategies sum their rows: it must not be folded.
TRACED_AT_OTHER_TIMES = """
    import tensorflow as tf

    def total(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(float(x.shape[0])))

    def total_of_vector(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant([float(x.shape[0])] * 2))[1]

    for function in map(tf.function, (total, total_of_vector)):
        for step in range(4):
            rows = 2 + 2 * step * rank  # Rank 1 traces in each step, rank 0 in the first.
            print(float(strategy.run(function, args=(tf.ones([rows, 1]),))))
"""

# Keras gathers how many rows each rank has, which is a constant of the traced step.
RAGGED = """
import json, keras, numpy as np
import tensorflow as tf


class Words(keras.Model):
    def call(self, lengths):
        return tf.ragged.range(lengths), tf.RaggedTensor.from_tensor(tf.reshape(lengths, (-1, 1, 1)), ragged_rank=2)


with strategy.scope():
    model = Words()
numbers, nested = model.predict(np.array([2, 0, 1, 3, 1], "int32"), batch_size=3, verbose=0)
print(json.dumps([numbers.to_list(), nested.to_list()]))
"""

UNEVEN_PREDICTIONS = """
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile()
    for _ in range(4):
        print(*model.predict_on_batch(tf.constant([[1.0], [2.0], [4.0]]))[:, 0])
"""

# A model with labels for outputs; the last batch gives one rank no row.
STRINGS = """
    import json
    import keras
    import tensorflow as tf

    class Labels(keras.Model):
        def predict_step(self, data):
            return tf.gather(tf.constant(["", "one", "zw\u00f6lf", "three"]), tf.cast(data[:, 0], tf.int32))

    with strategy.scope():
        model = Labels()
    labels = model.predict(tf.reshape(tf.range(5.0) % 4, [5, 1]), batch_size=4, verbose=0)
    print(json.dumps([label.decode() for label in labels]))
"""
