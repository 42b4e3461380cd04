"""Tables under every strategy: lookups and updates touch rows, no tensor has a table's size, results agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_process import job, write_script

pytestmark = pytest.mark.tensorflow

ROWS, DEADLINE_S = 4001, 300.0

TRAIN = f"""
    import contextlib, json
    import keras, numpy as np, tensorflow as tf
    from keras import layers

    def graphs(graph):
        "A graph, and those of the functions in it: branches and loops."
        yield graph
        for function in list(getattr(graph, "_functions", {{}}).values()):
            if getattr(function, "graph", None) is not None:
                yield from graphs(function.graph)

    models = []

    def train(strategy, sharded, make_optimizer=keras.optimizers.SGD, rows={ROWS}, shards=3, **options):
        "Trains, and looks at what the optimizer got and at the graph around it."
        kinds, seen = {{}}, []

        class Watched(make_optimizer):
            def update_step(self, gradient, variable, learning_rate):
                kinds["x".join(map(str, variable.shape))] = type(gradient).__name__
                if not tf.executing_eagerly():
                    outer = tf.compat.v1.get_default_graph()
                    while hasattr(getattr(outer, "outer_graph", None), "outer_graph"):
                        outer = outer.outer_graph
                    if not any(outer is graph for graph in seen):
                        seen.append(outer)
                super().update_step(gradient, variable, learning_rate)

        keras.utils.set_random_seed(5)
        with strategy.scope() if strategy else contextlib.nullcontext():
            ids = keras.Input((7,), dtype="int64")
            if sharded:
                import tfdistkit.layers
                table = tfdistkit.layers.ShardedEmbedding(rows, 8, shards=shards, mask_zero=True)
            else:
                table = layers.Embedding(rows, 8, mask_zero=True)
            found = table(ids)
            outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(found))
            model = keras.Model(ids, outputs)
            model.compile(Watched(0.5, **options), "mse", jit_compile=False)
        models.append(model)
        random = np.random.RandomState(1)
        x = random.randint(0, rows, (23, 7)) // random.randint(1, 400, (23, 1))
        data = tf.data.Dataset.from_tensor_slices((x, x.sum(1) / 1e4)).batch(8)
        history = model.fit(data, epochs=2, verbose=0)
        sizes = {{tuple(v.shape) for v in table.weights}}
        dense = sorted({{op.type for one in seen for graph in graphs(one) for op in graph.get_operations()
                        for out in op.outputs if out.dtype.is_floating and tuple(out.shape.as_list() if
                        out.shape.rank is not None else ()) in sizes}})
        whole = np.concatenate([v.numpy() for v in table.weights])
        return {{"kinds": kinds, "dense": dense, "losses": history.history["loss"], "graphs": len(seen),
                "rows": np.flatnonzero(whole.any(1)).size, "table": whole[::50].tolist(),
                "placed": [getattr(v.value, "device", "") for v in table.weights]}}
"""

BOTH = (
    TRAIN
    + """
    print(json.dumps({"stock": train(strategy, False), "sharded": train(strategy, True)}))
"""
)

ONE_PROCESS = (
    TRAIN
    + """
    import tfdistkit
    mirrored, one_device = tfdistkit.strategy("mirrored", devices=2), tfdistkit.strategy("one_device")
    results = {}
    central = tfdistkit.strategy("central_storage", devices=2)
    strategies = {"plain": None, "one_device": one_device, "mirrored": mirrored, "central_storage": central}
    for name, strategy in strategies.items():
        results[name] = {"stock": train(strategy, False)}
        if strategy is not central:
            results[f"{name} adagrad"] = train(strategy, False, keras.optimizers.Adagrad)
        if strategy is not None:
            results[name]["sharded"] = train(strategy, True)
        if strategy in (None, one_device):
            results[f"{name} clipped"] = train(strategy, False, global_clipnorm=0.01)
            results[f"{name} adam"] = train(strategy, False, keras.optimizers.Adam)
    print(json.dumps(results))
"""
)

SERVERS = (
    """
    import pathlib, tfdistkit
    strategy = tfdistkit.strategy("parameter_server", timeout_s=200, heartbeat_timeout_s=60)
"""
    + TRAIN
    + """
    from tfdistkit.layers import partition
    partition._WORTH_SPLITTING_BYTES = 0  # So that this small table gets a shard on each server.
    results = {"stock": train(strategy, False), "sharded": train(strategy, True, shards=None)}
    # From two servers to one variable without servers, and back to the servers in five shards.
    trained = models[-1]
    expected = np.concatenate([v.numpy() for v in trained.layers[1].weights])
    trained.save_weights("sharded.weights.h5")
    train(None, False)
    models[-1].load_weights("sharded.weights.h5")
    loaded = [models[-1].layers[1].get_weights()[0]]
    models[-1].save_weights("plain.weights.h5")
    train(strategy, True, shards=5)
    models[-1].load_weights("plain.weights.h5")
    loaded.append(np.concatenate([v.numpy() for v in models[-1].layers[1].weights]))
    results["restored"] = [bool((one == expected).all()) for one in loaded]
    pathlib.Path("result.json").write_text(json.dumps(results))
"""
)

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns results of one process: without a strategy, under one_device, and under mirrored with two devices."""
    script = tmp_path_factory.mktemp("alone") / "script.py"
    script.write_text(textwrap.dedent(ONE_PROCESS))
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def check(results: dict[str, Any], reference: dict[str, Any]) -> None:
    """Checks that only rows are touched, for `Embedding` and for three shards, and compares with one process."""
    for layer, result in results.items():
        assert result["graphs"] > 0
        assert result["dense"] == [], layer
        tables = [kind for shape, kind in result["kinds"].items() if shape.endswith("x8")]
        assert set(tables) == {"IndexedSlices"} and len(tables) == (2 if layer == "sharded" else 1)
        np.testing.assert_allclose(result["losses"], reference["losses"], rtol=1e-6)
        np.testing.assert_allclose(result["table"], reference["table"], rtol=1e-5, atol=1e-7)


def test_a_tensor_of_the_size_of_a_table_is_detected(alone: dict[str, Any]) -> None:
    plain = alone["plain"]["stock"]
    assert plain["dense"] == ["ReadVariableOp"] and plain["rows"] == ROWS
    assert "Sqrt" in alone["plain adagrad"]["dense"]
    assert alone["plain clipped"]["kinds"][f"{ROWS}x8"] != "IndexedSlices"


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "central_storage"])
def test_rows_in_one_process(alone: dict[str, Any], strategy: str) -> None:
    check(alone[strategy], alone["plain"]["stock"])


def test_the_same_bits_in_one_process(alone: dict[str, Any]) -> None:
    for result in alone["one_device"].values():
        assert result["losses"] == alone["plain"]["stock"]["losses"]
        assert result["table"] == alone["plain"]["stock"]["table"]
    for name in ("adagrad", "adam"):
        assert alone[f"one_device {name}"]["table"] == alone[f"plain {name}"]["table"]


@pytest.mark.parametrize("case", ["one_device adagrad", "one_device clipped", "mirrored adagrad"])
def test_optimizers_that_can_update_rows_do(alone: dict[str, Any], case: str) -> None:
    check({"stock": alone[case]}, alone[f"plain {case.split()[1]}"])


@pytest.mark.parametrize("engine", ["multiworker", pytest.param("horovod", marks=pytest.mark.horovod)])
@pytest.mark.part(BOTH)
def test_rows_on_two_ranks(printed: list[str], alone: dict[str, Any]) -> None:
    for rank in printed:
        check(json.loads(rank.splitlines()[-1]), alone["plain"]["stock"])


def test_rows_on_parameter_servers(tmp_path: Path, alone: dict[str, Any]) -> None:
    words = ("--ps", "2", "-np", "2", "--log-dir", "logs", write_script(tmp_path, SERVERS))
    with job(*words, cwd=tmp_path, TFDISTKIT_OWN_MODELS="1", **ENVIRONMENT) as running:
        ended = running.end(DEADLINE_S)
        assert running.left() == []
    assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
    results = json.loads(next(tmp_path.rglob("result.json")).read_text())
    assert results.pop("restored") == [True, True]
    for layer, result in results.items():
        assert result["dense"] == [], layer
        assert {kind for shape, kind in result["kinds"].items() if shape.endswith("x8")} == {"IndexedSlices"}
        # Two workers run their batches concurrently, each on weights without the other's update.
        np.testing.assert_allclose(result["table"], alone["plain"]["stock"]["table"], atol=0.01)
    servers = [device.split("/")[3] for device in results["sharded"]["placed"]]
    assert sorted(servers) == ["task:0", "task:1"]
