"""Steps of one process do not leak memory: their collectives reuse a few keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parity import engines

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

SCRIPT = """
import json, sys
import tensorflow as tf
from parity.making import make_strategy
from tfdistkit.keras_adapter import private_collectives
from tfdistkit.strategies.sync import collective_keys

strategy = make_strategy(sys.argv[1])
drawn = []
draw = private_collectives.draw_instance_key
private_collectives.draw_instance_key = lambda launcher: drawn.append(1) or draw(launcher)


def all_reduce(value):
    return tf.distribute.get_replica_context().all_reduce("SUM", value)


inner = tf.function(lambda x: all_reduce(x) + all_reduce(2.0 * x))


def step(x):
    for _ in range(collective_keys._KEYS_OF_ONE):  # More collectives in a step than a collective has keys.
        x = inner(x) / 6.0
    return x


def fails(x, holds):
    with tf.control_dependencies([tf.debugging.assert_equal(holds, True)]):
        return all_reduce(all_reduce(x)) / 4.0


def local(value):
    return [v.numpy().tolist() for v in strategy.experimental_local_results(value)]


run = tf.function(lambda x: strategy.run(step, args=(x,)))
may_fail = tf.function(lambda x, holds: strategy.run(fails, args=(x, holds)))
found = {"values": [], "errors": 0}
for number in range(70):
    found["values"].append(local(run(tf.constant(1.0))))
    try:
        found["values"].append(local(may_fail(tf.constant(1.0), tf.constant(number % 9 != 4))))
    except tf.errors.InvalidArgumentError:
        found["errors"] += 1
found["shapes"] = [local(run(tf.ones([size]))) for size in (3, 5, 3)]
found["drawn"] = len(drawn)
json.dump(found, open(sys.argv[2], "w"))
"""


def test_keys_are_reused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    engines.start(tmp_path, ["script.py", "mirrored", "found.json"]).wait(200)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["values"] == [[1.0, 1.0]] * len(found["values"]) and len(found["values"]) == 70 + 62
    assert found["errors"] == 8
    assert found["shapes"] == [[[1.0] * size] * 2 for size in (3, 5, 3)]
    # For two replicas, at most 64 of two collectives in `run`, traced for three shapes, and of two in `may_fail`.
    assert 0 < found["drawn"] <= 2 * 64 * (2 * 3 + 2)
