"""`BackupAndResume` under every strategy: a resumed run ends as an uninterrupted one."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import pytest

SINGLE = pathlib.Path(__file__).parents[1] / "single"
sys.path.insert(0, str(SINGLE))

pytestmark = pytest.mark.tensorflow

ON_TWO_RANKS = ["multiworker", pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.thorough])]

SETUP = f"""
    import functools, json, os, pathlib, sys
    sys.path.insert(0, {str(SINGLE)!r})
    import keras, numpy as np, tensorflow as tf
    from interrupted_runs import arrays, assert_same, compiled, run
    import tfdistkit
    from tfdistkit.callbacks import ChiefOnly, LearningRateWarmup, MetricAverage, StopTogether

    def in_scope(strategy, **options):
        with strategy.scope():
            return compiled(**options)

    def in_arrays():
        x, y = arrays()
        return dict(x=x, y=y, batch_size=5)

    def shuffled():
        return dict(x=tf.data.Dataset.from_tensor_slices(arrays()).shuffle(22).batch(5))

    def repeated():
        data = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(22).repeat().batch(5)
        return dict(x=data, steps_per_epoch=5)

    def dealt(**place):
        return dict(x=tfdistkit.data.from_arrays(arrays(), shuffle=True, seed=3, **place).batch(5))

    def callbacks():
        return [
            LearningRateWarmup(warmup_epochs=2),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.3),
            MetricAverage(),
            StopTogether(keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)),
        ]
"""

# A model of one process, or of both.
LINEAR = """
    os.environ["TFDISTKIT_OWN_MODELS"] = "1"
    def linear(scope=None):
        keras.utils.set_random_seed(3)
        with scope or tf.distribute.get_strategy().scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        return model
    on_two = lambda: linear(strategy.scope())
    no_more = lambda: []
"""

RANKS = (
    SETUP
    + """
    make = functools.partial(in_scope, strategy)
    expected = run(make, in_arrays, callbacks, None)
    # In the middle of an epoch, at its end, and in an execution of several steps; ranks without a shared disk.
    for break_at in (3, 6):
        assert run(make, in_arrays, callbacks, folder / f"disk{rank}", break_at, save_freq=2) is None
        assert (folder / f"disk{rank}").exists() == (rank == 0)
    found = run(make, in_arrays, callbacks, folder / f"disk{rank}", save_freq=2)
    assert found["batches"][0] == (1, 1), found["batches"]  # broken off at step 3 + 5 - 1 = 7; backup after 2 + 4
    assert_same(found, expected)
    if rank == 0:  # its own, by itself: the others are through before it has taken it away
        assert not list(folder.glob("disk*"))

    def light():
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    for data in (shuffled, repeated):
        expected = run(light, data, list, None)
        assert run(light, data, list, folder / "shared", 8) is None
        if data is shuffled:
            # Another rank has the backup now.
            if rank == 0:
                (folder / "moved").mkdir()
                (folder / "shared" / "training.backup").rename(folder / "moved" / "training.backup")
            strategy.gather(tf.zeros([1]), axis=0)
            again = folder / ("moved" if rank == 1 else "shared")
        else:
            again = folder / "shared"
        found = run(light, data, list, again)
        assert found["batches"][0] == (1, 2), found["batches"]
        assert_same(found, expected)

    three = functools.partial(in_scope, strategy, steps_per_execution=3)
    expected = run(three, in_arrays, callbacks, None)
    assert run(three, in_arrays, callbacks, folder / "three", 4) is None
    assert_same(run(three, in_arrays, callbacks, folder / "three"), expected)

    # Two processes resume a backup of one; the test does the reverse.
"""
    + LINEAR
    + """
    expected = run(on_two, in_arrays, no_more, None)
    assert run(linear, in_arrays, no_more, folder / "one", 8) is None
    found = run(on_two, in_arrays, no_more, folder / "one")
    assert found["batches"][0] == (1, 2)
    for a, b in zip(found["values"], expected["values"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert run(on_two, in_arrays, no_more, folder / "two", 8) is None
    if rank == 0:
        np.savez(folder / "expected.npz", *expected["values"])
        print(json.dumps({"folder": str(folder), "loss": expected["history"]["loss"]}))

    print("same")
"""
)

# Two processes and one resume each other's backups, where each rank has its own shard.
OWN_PARTS = (
    SETUP
    + LINEAR
    + """
    expected = run(on_two, dealt, no_more, None)
    alone = lambda: dealt(num_shards=1, index=0)
    assert run(on_two, dealt, no_more, folder / "own parts", 8) is None
    assert_same(run(on_two, dealt, no_more, folder / "own parts"), expected)
    assert run(linear, alone, no_more, folder / f"alone{rank}", 8) is None
    strategy.gather(tf.zeros([1]), axis=0)
    found = run(on_two, dealt, no_more, folder / "alone0")
    assert found["batches"][0] == (1, 2), found["batches"]
    for a, b in zip(found["values"], expected["values"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert run(on_two, dealt, no_more, folder / "two own parts", 8) is None
    strategy.gather(tf.zeros([1]), axis=0)
    if rank == 0:
        (folder / "own parts of one").mkdir()
        (folder / "two own parts" / "training.backup").rename(folder / "own parts of one" / "training.backup")
    strategy.gather(tf.zeros([1]), axis=0)
    if rank == 0:
        found = run(linear, alone, no_more, folder / "own parts of one")
        assert found["batches"][0] == (1, 2), found["batches"]
        for a, b in zip(found["values"], expected["values"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    print("same")
"""
)


@pytest.mark.part(RANKS)
@pytest.mark.parametrize("engine", ON_TWO_RANKS)
def test_two_ranks_resume_at_their_position(printed: list[str]) -> None:
    assert all(text.endswith("same\n") for text in printed)


@pytest.mark.thorough
@pytest.mark.part(OWN_PARTS)
@pytest.mark.parametrize("engine", ON_TWO_RANKS)
def test_backups_of_own_shards_are_resumed_on_another_number(printed: list[str]) -> None:
    assert all(text.endswith("same\n") for text in printed)


@pytest.mark.part(RANKS)
@pytest.mark.parametrize("engine", ON_TWO_RANKS)
def test_one_process_resumes_a_backup_of_two(printed: list[str]) -> None:
    import keras
    from interrupted_runs import arrays, run

    def linear() -> keras.Model:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        return model

    told = json.loads(printed[0].splitlines()[-2])
    folder = pathlib.Path(told["folder"])
    x, y = arrays()
    kept = (folder / "two" / "training.backup").read_bytes()
    found = run(linear, lambda: {"x": x, "y": y, "batch_size": 5}, list, folder / "two")
    (folder / "two").mkdir()
    (folder / "two" / "training.backup").write_bytes(kept)  # for whoever runs this test again
    assert found is not None and found["batches"][0] == (1, 2)
    np.testing.assert_allclose(found["history"]["loss"], told["loss"], rtol=1e-5)
    with np.load(folder / "expected.npz") as expected:
        for i, value in enumerate(found["values"]):
            np.testing.assert_allclose(value, expected[f"arr_{i}"], rtol=1e-4, atol=1e-6)


LOCAL_STRATEGIES = """
    import tfdistkit
    strategies = {name: tfdistkit.strategy(name, devices=2) for name in ("mirrored", "central_storage")}
    strategies["one_device"] = tfdistkit.strategy("one_device")
"""

LOCAL = (
    SETUP
    + """
    for name, strategy in strategies.items():
        make = functools.partial(in_scope, strategy)
        expected = run(make, shuffled, callbacks, None)
        assert run(make, shuffled, callbacks, folder / name, 8) is None
        found = run(make, shuffled, callbacks, folder / name)
        assert found["batches"][0] == (1, 2), found["batches"]
        assert_same(found, expected)
        print(name, "same")
"""
)


@pytest.mark.part(LOCAL, setup=LOCAL_STRATEGIES)
@pytest.mark.parametrize(("engine", "world_size"), [("mirrored", 1)])
def test_strategies_of_one_process_resume_at_their_position(printed: list[str]) -> None:
    lines = [line for line in printed[0].splitlines() if line.endswith(" same")]
    assert lines == ["mirrored same", "central_storage same", "one_device same"], printed[0]
