"""`tfdistkit.collectives` in one process: identity results, mistakes, and the replicas of `mirrored`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfdistkit import collectives
from tfdistkit.collectives import registry
from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow


@pytest.fixture(autouse=True)
def no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_last", None)


def test_one_process_gets_its_input_back() -> None:
    x = np.arange(6.0).reshape(3, 2)
    for result in (
        collectives.all_reduce(x),
        collectives.all_reduce(x, "average"),
        collectives.all_reduce(x, op="max"),
        *collectives.grouped_all_reduce([x]),
        collectives.all_gather(x, axis=-1),
        collectives.broadcast(x),
        collectives.reduce_scatter(x, "min"),
        collectives.all_to_all(x),
        collectives.all_to_all(x, [3])[0],
        tf.function(collectives.all_gather)(x),
    ):
        assert tf.is_tensor(result)
        np.testing.assert_array_equal(result, x)
    assert collectives.all_to_all(x, [3])[1].numpy().tolist() == [3]
    assert collectives.all_gather(5).numpy().tolist() == [5]
    given = object()
    assert collectives.broadcast_object(given) is given
    collectives.barrier()
    collectives.barrier(timeout_s=1)


def test_gradients_pass_in_one_process() -> None:
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = collectives.all_reduce(collectives.all_gather(collectives.broadcast(x)), "average")
    assert tape.gradient(y, x).numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: collectives.all_reduce(1.0, "mean"), "`op` must be one of: sum, average, min, max"),
        (lambda: collectives.all_reduce(1.0, "averge"), "'average'"),
        (lambda: collectives.all_reduce([True]), 'must be "min" (all) or "max" (any) for a tensor of booleans'),
        (lambda: collectives.all_reduce("text"), "must be a dense tensor"),
        (lambda: collectives.all_reduce(None), "convertible to one tensor"),
        (lambda: collectives.all_gather([np.ones(2), np.ones(3)]), "grouped_all_reduce"),
        (lambda: collectives.grouped_all_reduce(None), "must be a list of tensors"),
        (lambda: collectives.grouped_all_reduce({"a": 1.0}), "the values of a dict"),
        (lambda: collectives.all_reduce(tf.constant(["text"])), "dtype that collectives can send"),
        (lambda: collectives.all_reduce(tf.complex(1.0, 1.0)), "Received: complex64"),
        (lambda: collectives.all_reduce(tf.ragged.constant([[1], [2, 3]])), "RaggedTensor"),
        (lambda: collectives.grouped_all_reduce(tf.ones([2])), "Call `all_reduce`"),
        (lambda: collectives.all_gather([1.0], axis=1), "-1 to 0"),
        (lambda: collectives.all_gather([1.0], axis=True), "`axis` must be an integer from -1 to 0"),
        (lambda: collectives.broadcast(1.0, root_rank=1), "root_rank=1"),
        (lambda: collectives.broadcast_object(1, root_rank=-1), "root_rank=-1"),
        (lambda: collectives.reduce_scatter(1.0), "must have rows to divide"),
        (lambda: collectives.all_to_all([1.0, 2.0], splits=[1]), "[1] for 2 rows"),
        (lambda: collectives.all_to_all([1.0, 2.0], splits=[1, 1]), "1 integers >= 0 that sum"),
        (lambda: collectives.barrier(timeout_s=0), "timeout_s=0"),
    ],
)
def test_mistakes_are_named(call, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OptionError) as error:
        call()
    assert says in str(error.value)


def test_an_unknown_number_of_dimensions_is_named() -> None:
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def gathered(x: object) -> object:
        return collectives.all_gather(x)

    with pytest.raises(Exception, match="known number of dimensions"):  # AutoGraph changes its type.
        gathered(tf.ones([2]))


def test_objects_stay_out_of_graphs() -> None:
    with pytest.raises(Exception, match="must be called outside of `tf.function`"):  # AutoGraph changes its type.
        tf.function(lambda: collectives.broadcast_object(1))()


def test_process_sets_need_horovod() -> None:
    with pytest.raises(UnsupportedError, match="'horovod'"):
        collectives.ProcessSet([0])


def test_other_workers_need_a_strategy_first(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"cluster": {"worker": ["127.0.0.1:4000", "127.0.0.1:4001"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    with pytest.raises(UnsupportedError, match=r"must be called before the first collective.*rank 1 of 2"):
        collectives.all_reduce(1.0)


def test_check_and_its_variable_choose_which_calls_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfdistkit.collectives import mismatches

    for value, meant in (("1", True), ("0", False), ("", None)):
        monkeypatch.setenv("TFDISTKIT_CHECK_COLLECTIVES", value)
        assert mismatches.compares() is meant
        collectives.check(not meant)
        assert mismatches.compares() is (not meant)
        collectives.check(None)


MIRRORED = """
    import tfdistkit
    strategy = tfdistkit.strategy("mirrored", devices=2)
    import numpy as np, tensorflow as tf
    from tfdistkit import collectives as c

    def work():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.cast(rank, tf.float32) + 1.0
        rows = tf.fill([rank + 1, 2], own)
        x = own * tf.ones([2])
        with tf.GradientTape() as tape:
            tape.watch([rows, x])
            gathered = c.all_gather(rows)
            loss = own * (tf.reduce_sum(gathered[:, 0]) + tf.reduce_sum(c.all_reduce(x, "average")))
        gradients = tape.gradient(loss, [rows, x])
        return (gathered, *gradients, c.all_reduce(own, "max"), c.broadcast(own, 1), c.reduce_scatter([own, 10.0]),
                c.all_to_all([10 * rank, 10 * rank + 1]))

    def check(results):
        for rank, (gathered, of_rows, of_x, largest, sent, share, exchanged) in enumerate(
            zip(*(strategy.experimental_local_results(r) for r in results))
        ):
            np.testing.assert_array_equal(gathered, [[1, 1], [2, 2], [2, 2]])
            np.testing.assert_array_equal(of_rows, [[3, 0]] * (rank + 1))
            np.testing.assert_array_equal(of_x, [1.5, 1.5])
            assert largest == 2 and sent == 2
            np.testing.assert_array_equal(share, [[3], [20]][rank])
            np.testing.assert_array_equal(exchanged, [rank, 10 + rank])

    check(strategy.run(work))
    check(tf.function(lambda: strategy.run(work))())
    check(strategy.run(tf.function(work)))

    # A loop around the replicas; one within each would hang in TensorFlow's own all-reduce.
    @tf.function
    def in_a_loop():
        total = tf.zeros([2])
        for _ in tf.range(3):
            gathered = strategy.run(lambda: tf.reduce_sum(c.all_gather(tf.ones([2]))))
            total += tf.stack(strategy.experimental_local_results(gathered))
        return total
    np.testing.assert_array_equal(in_a_loop(), [12.0, 12.0])

    # Outside of the replicas there is one process.
    assert float(c.all_reduce(3.0)) == 3.0
    with strategy.scope():
        assert c.all_gather([1.0]).shape == (1,)
    c.barrier()
    try:
        c.all_reduce(strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group))
    except ValueError as error:
        assert "PerReplica" in str(error)
    else:
        raise AssertionError("a value of two replicas")
    try:
        strategy.run(lambda: c.all_reduce(1.0, process_set=object()))
    except RuntimeError as error:
        assert "horovod" in str(error)
    else:
        raise AssertionError("a process set")
"""


def test_replicas_of_one_process(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(MIRRORED))
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
