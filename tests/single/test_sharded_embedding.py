"""`ShardedEmbedding` equals `Embedding` with any number of shards, and their files are compatible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow

ROWS, IDS = 11, [[0, 3, 10], [5, 5, -1], [4, 7, 8]]


def sharded(*args: Any, **options: Any) -> Any:
    from tfdistkit.layers import ShardedEmbedding

    return ShardedEmbedding(*args, **options)


def pair(shards: int, **options: Any) -> tuple[Any, Any]:
    """An `Embedding`, and a `ShardedEmbedding` in its place."""
    layers = []
    for make, more in ((keras.layers.Embedding, {}), (sharded, {"shards": shards})):
        keras.utils.set_random_seed(7)
        layers.append(make(ROWS, 4, **options, **more))
        layers[-1].build()
    return layers[0], layers[1]


@pytest.mark.parametrize("shards", [1, 3, ROWS])
@pytest.mark.parametrize("ids", [IDS, [2, 9], 6, [[[1], [2]]]], ids=str)
def test_the_same_rows_bit_for_bit(shards: int, ids: Any) -> None:
    plain, ours = pair(shards)
    assert [v.shape[0] for v in ours.weights] == {1: [11], 3: [4, 4, 3], 11: [1] * 11}[shards]
    for dtype in ("int32", "int64", "uint8", "float32"):
        given = tf.cast(tf.constant(ids), dtype) if min(np.ravel(ids)) >= 0 else tf.constant(ids)
        np.testing.assert_array_equal(ours(given), plain(given))
    traced = tf.function(ours).get_concrete_function(tf.TensorSpec((None, 3), tf.int32))
    assert traced.structured_outputs.shape.as_list() == [None, 3, 4]


def test_ragged_sparse_and_no_ids() -> None:
    plain, ours = pair(3, mask_zero=True)
    ragged = tf.ragged.constant([[1, 2], [], [10]])
    assert ours(ragged).to_list() == plain(ragged).to_list()
    assert ours(tf.zeros((0, 5), tf.int32)).shape == (0, 5, 4)
    assert ours.compute_mask(tf.constant([0, 4])).numpy().tolist() == [False, True]
    with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
        ours(tf.constant([ROWS]))
    plain, ours = pair(3)
    sparse = tf.sparse.from_dense([[0, 3], [9, 0]])
    np.testing.assert_array_equal(ours(sparse), plain(sparse))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_precision(policy: str) -> None:
    plain, ours = pair(3, dtype=policy)
    assert ours(tf.constant(IDS)).dtype == plain(tf.constant(IDS)).dtype == keras.DTypePolicy(policy).compute_dtype
    np.testing.assert_array_equal(ours(tf.constant(IDS)), plain(tf.constant(IDS)))
    assert {v.dtype for v in ours.weights} == {plain.weights[0].dtype}


OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"]
# They compute on a whole variable, which is a shard here.
BY_VARIABLE = ["Lamb", "Adafactor", "Muon"]


def steps(layer: Any, optimizer: Any) -> np.ndarray:
    """Trains a layer for some steps, a row of each batch twice, and returns its table."""
    for ids in ([1, 5, 5, 10], [5, 0, 2, 3], [1, 1, 1, 1]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(tf.constant(ids)) - 0.3)) + sum(layer.losses)
        optimizer.apply(tape.gradient(loss, [v.value for v in layer.weights]), layer.weights)
    return np.concatenate([v.numpy() for v in layer.weights])


@pytest.mark.parametrize("name", OPTIMIZERS + [n for n in BY_VARIABLE if hasattr(keras.optimizers, n)])
def test_every_optimizer(name: str) -> None:
    plain, ours = pair(3, embeddings_regularizer="l2", embeddings_constraint="non_neg")
    make = getattr(keras.optimizers, name)
    before = np.concatenate([v.numpy() for v in ours.weights])
    try:
        expected = steps(plain, make(0.1))
    except AttributeError as error:  # Muon of Keras 3.10 does not accept variables of TensorFlow.
        if name != "Muon" or not keras.__version__.startswith("3.10."):
            raise
        pytest.skip(f"{name} of Keras {keras.__version__} cannot train Keras's own Embedding: {error}")
    came = steps(ours, make(0.1))
    assert np.isfinite(came).all() and not np.allclose(came, before)
    if name in OPTIMIZERS:
        np.testing.assert_allclose(came, expected, rtol=1e-6, atol=1e-7)


def model_with(table: Any) -> Any:
    model = keras.Sequential([keras.Input((3,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse", run_eagerly=True)
    return model


def state(model: Any) -> list[np.ndarray]:
    """Returns all saved values, with the shards of the table joined."""
    from tfdistkit.keras_adapter.table_parts import joined

    parts = model.layers[0].weights
    weights = [joined(parts), *(v.numpy() for v in model.layers[-1].weights)]
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    return [*weights, *(np.asarray(store[key]) for key in sorted(store, key=int))]


def test_files_load_with_any_number_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfdistkit.layers import partition

    x, y = np.array([[1, 2, 3], [4, 9, 10]]), np.ones((2, 1))
    models = {}
    for name, make in {"plain": keras.layers.Embedding, "three": sharded, "five": sharded}.items():
        keras.utils.set_random_seed(3)
        options = {"three": {"shards": 3}, "five": {"shards": 5}}.get(name, {})
        models[name] = model_with(make(ROWS, 4, **options))
        models[name].fit(x, y, epochs={"plain": 3, "three": 2, "five": 1}[name], verbose=0)
    assert not np.allclose(state(models["plain"])[0], state(models["five"])[0])
    path = tmp_path / "model.weights.h5"
    for saved, loaded in (("three", "five"), ("plain", "three"), ("five", "plain")):
        models[saved].save_weights(path)
        models[loaded].load_weights(path)
        expected, came = state(models[saved]), state(models[loaded])
        assert len(expected) == len(came) > 8
        for one, other in zip(expected, came):
            np.testing.assert_array_equal(one, other)

    # As with another number of servers: the default number of shards is not in the file.
    monkeypatch.setattr(partition, "count_shards", lambda *_: 2)
    model = model_with(sharded(ROWS, 4))
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    monkeypatch.setattr(partition, "count_shards", lambda *_: 4)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (len(model.layers[0].weights), len(loaded.layers[0].weights)) == (2, 4)
    for one, other in zip(state(model), state(loaded)):
        np.testing.assert_array_equal(one, other)
    model.fit(x, y, verbose=0)
    loaded.fit(x, y, verbose=0)
    np.testing.assert_allclose(state(model)[0], state(loaded)[0], rtol=1e-6)


def test_state_without_rows_loads_with_the_same_shards_only() -> None:
    optimizers = [keras.optimizers.Adafactor(rate) for rate in (0.1, 0.2, 0.3)]
    for optimizer, shards in zip(optimizers, (4, 4, 3)):
        steps(pair(shards)[1], optimizer)
    store: dict[str, Any] = {}
    optimizers[0].save_own_variables(store)
    # With 4 shards the file has as many arrays as the optimizer for 3 shards has variables.
    assert len(store) == len(optimizers[2].variables)
    before = [v.numpy() for v in optimizers[2].variables]
    with pytest.warns(UserWarning, match="Skipping variable loading .* it must have the variables"):
        optimizers[2].load_own_variables(store)
    optimizers[1].load_own_variables(store)
    for loaded, expected in ((optimizers[1], (v.numpy() for v in optimizers[0].variables)), (optimizers[2], before)):
        for one, other in zip(loaded.variables, expected, strict=True):
            np.testing.assert_array_equal(one.numpy(), other)


def test_get_and_set_weights_use_whole_tables() -> None:
    plain, ours = pair(3)
    table = np.arange(44.0, dtype="float32").reshape(ROWS, 4)
    ours.set_weights([table])
    np.testing.assert_array_equal(ours.whole_table(), table)
    ours.set_weights(ours.get_weights())
    plain.set_weights([ours.whole_table()])
    np.testing.assert_array_equal(plain.get_weights()[0], table)
    np.testing.assert_array_equal(sharded(ROWS, 4, shards=2, weights=table).whole_table(), table)
    with pytest.raises(ValueError, match="The table must have the shape"):
        ours.set_weights([table[1:]])
    again = type(ours).from_config(ours.get_config())
    assert (again.shards, again.shard_bytes, again.input_dim) == (3, ours.shard_bytes, ROWS)


def test_tables_too_large_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfdistkit.layers import initial_rows

    monkeypatch.setattr(initial_rows, "_LARGEST_WHOLE_BYTES", 0)
    for name in ("uniform", "glorot_uniform", "he_normal", "lecun_normal"):
        keras.utils.set_random_seed(1)
        ours = sharded(6000, 8, shards=3, embeddings_initializer=name)
        ours.build()
        keras.utils.set_random_seed(1)
        whole = keras.initializers.get(name)((6000, 8))
        parts = [v.numpy() for v in ours.weights]
        assert not np.allclose(parts[0], parts[1])
        assert np.std(ours.whole_table()) == pytest.approx(np.std(whole), rel=0.02)


def test_default_number_of_shards() -> None:
    from tfdistkit.layers import partition

    gigabyte = 2**30
    for servers, table_bytes, shard_bytes, parts in [
        (0, 100 * gigabyte, gigabyte, 1),
        (1, 100 * gigabyte, gigabyte, 1),
        (2, 2**26, gigabyte, 1),
        (2, 2**26 + 64, gigabyte, 2),
        (4, 4 * gigabyte, gigabyte, 4),
        (4, 4 * gigabyte + 64, gigabyte, 8),
    ]:
        assert partition.count_shards(table_bytes // 64, 64, servers, shard_bytes) == parts
    assert partition.first_rows(10, 4) == [0, 3, 6, 8, 10]
    assert partition.number_of_servers() == 0


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (OptionError, "shards=0", {"shards": 0}),
        (OptionError, "shards=12, input_dim=11", {"shards": 12}),
        (OptionError, "shard_bytes='1 GB'", {"shard_bytes": "1 GB"}),
        (OptionError, "output_dim=True", {"output_dim": True}),
        (UnsupportedError, "lora_rank=2", {"lora_rank": 2}),
        (UnsupportedError, "must work on rows or elements", {"embeddings_constraint": "max_norm"}),
    ],
)
def test_mistakes(error: type[Exception], says: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=says):
        sharded(**{"input_dim": ROWS, "output_dim": 4, **options})
    with pytest.raises(OptionError, match="inputs of float16 for 5000 rows"):
        sharded(5000, 1, shards=2)(tf.constant([1.0], tf.float16))
