"""TensorFlow's parameter-server tutorial with Keras 3: `Model.fit` with data of the workers, and a custom loop.

https://www.tensorflow.org/tutorials/distribute/parameter_server_training has both halves. The flow is that one's; the
strategy line is ours, and what Keras 2 had and Keras 3 does not (DatasetCreator, tf ops on Keras tensors) is gone.
"""

from __future__ import annotations

import pytest
from coordinator_setup import last_report

pytestmark = [pytest.mark.tensorflow, pytest.mark.parametrize("engine", ["parameter_server"])]

SETUP = """
    import json
    import tfdistkit
    strategy = tfdistkit.strategy("parameter_server", timeout_s=200)
    import keras, numpy as np, tensorflow as tf
"""

MODEL_FIT = """
    import os
    GLOBAL_BATCH = 64
    def make_dataset(context):
        size = context.get_per_replica_batch_size(GLOBAL_BATCH)
        inputs = tf.random.uniform((640, 10), seed=5)
        rows = tf.data.Dataset.from_tensor_slices((inputs, tf.reduce_sum(inputs, 1, keepdims=True)))
        rows = rows.shuffle(640).repeat().shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.batch(size).prefetch(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.02), loss="mse", steps_per_execution=10)
    files = {name: str(folder / name) for name in ("backup", "log.csv", "epoch{epoch}.weights.h5", "whole.keras")}
    history = model.fit(
        strategy.distribute_datasets_from_function(make_dataset), epochs=5, steps_per_epoch=20, verbose=0, callbacks=[
            keras.callbacks.ModelCheckpoint(files["epoch{epoch}.weights.h5"], save_weights_only=True),
            keras.callbacks.BackupAndRestore(files["backup"]),
            keras.callbacks.CSVLogger(files["log.csv"]),
        ])
    evaluated = model.evaluate(strategy.distribute_datasets_from_function(make_dataset), steps=10, verbose=0)
    model.save(files["whole.keras"])
    again = keras.models.load_model(files["whole.keras"])
    rows = np.random.default_rng(0).uniform(size=(20, 10)).astype("float32")
    apart = np.abs(again.predict(rows, verbose=0) - model.predict(rows, verbose=0)).max()
    print(json.dumps({"loss": history.history["loss"], "evaluated": evaluated, "steps": int(model.optimizer.iterations),
                      "files": sorted(os.listdir(folder)), "apart": float(apart),
                      "logged": len(open(files["log.csv"]).readlines())}))
"""


@pytest.mark.part(MODEL_FIT, setup=SETUP)
def test_the_half_with_model_fit(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["steps"] == 5 * 20 and found["logged"] == 1 + 5
    assert found["loss"][-1] < 0.5 * found["loss"][0] and found["evaluated"] < found["loss"][0]
    assert {f"epoch{epoch}.weights.h5" for epoch in range(1, 6)} | {"whole.keras"} <= set(found["files"])
    assert found["apart"] < 1e-6


LOOP = """
    HERBS, WEEDS = ["thyme", "sage", "mint", "dill"], ["nettle", "thistle", "dock", "bindweed"]
    EXAMPLES, BATCH, STEPS = 160, 8, 20
    with strategy.scope():
        # Layers with lookup tables: each worker gets a copy.
        number_of_word = keras.layers.StringLookup(vocabulary=HERBS + WEEDS, mask_token=None)
        number_of_answer = keras.layers.StringLookup(vocabulary=["pull", "keep"], num_oov_indices=0, mask_token=None)
        words = keras.Input((3,), dtype="string", name="words")
        words_stage = keras.Model(words, number_of_word(words))
        answer = keras.Input((1,), dtype="string", name="answer")
        answer_stage = keras.Model(answer, number_of_answer(answer))

    def make_examples(count, seed):
        draw = np.random.default_rng(seed)
        kept = draw.integers(0, 2, count)
        beds = [list(draw.choice(HERBS if keep else WEEDS, 3)) for keep in kept]
        return {"words": beds, "answer": [["keep" if keep else "pull"] for keep in kept]}

    examples, unseen = make_examples(EXAMPLES, 1), make_examples(40, 2)

    def prepare(row):
        return words_stage(row["words"][None])[0], answer_stage(row["answer"][None])[0]

    def make_dataset(context):
        rows = tf.data.Dataset.from_tensor_slices(examples).shuffle(EXAMPLES)
        return rows.map(prepare).repeat().batch(BATCH).prefetch(1)

    def make_eval_dataset(context):
        rows = tf.data.Dataset.from_tensor_slices(unseen)
        return rows.map(prepare).repeat().batch(BATCH)

    with strategy.scope():
        numbers = keras.Input((3,), dtype="int64")
        looked_up = keras.layers.Embedding(input_dim=number_of_word.vocabulary_size(), output_dim=16)(numbers)
        kept = keras.layers.Dense(1, activation="sigmoid")(keras.ops.mean(looked_up, axis=1))
        model = keras.Model(numbers, kept)
        optimizer = keras.optimizers.RMSprop(0.05)
        accuracy, eval_accuracy = keras.metrics.Accuracy(), keras.metrics.Accuracy()
        crossentropy = keras.losses.BinaryCrossentropy(reduction=None)

    @tf.function
    def step(iterator):
        def in_replica(batch):
            inputs, targets = batch
            with tf.GradientTape() as tape:
                predicted = model(inputs, training=True)
                loss = tf.nn.compute_average_loss(crossentropy(targets, predicted))
                gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            accuracy.update_state(targets, tf.cast(predicted > 0.5, tf.int64))
            return loss
        losses = strategy.run(in_replica, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def eval_step(iterator):
        def in_replica(batch):
            inputs, targets = batch
            eval_accuracy.update_state(targets, tf.cast(model(inputs, training=False) > 0.5, tf.int64))
        strategy.run(in_replica, args=(next(iterator),))

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def of_each_worker():
        return strategy.distribute_datasets_from_function(make_dataset)

    @tf.function
    def eval_of_each_worker():
        return strategy.distribute_datasets_from_function(make_eval_dataset)

    iterator = iter(coordinator.create_per_worker_dataset(of_each_worker))
    accuracies, counts = [], []
    for epoch in range(5):
        accuracy.reset_state()
        for _ in range(STEPS):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        accuracies.append(float(accuracy.result()))
        counts.append(float(accuracy.count))
    loss = coordinator.schedule(step, args=(iterator,)).fetch()

    # Evaluation on the coordinator, and on the workers.
    for inputs, targets in tf.data.Dataset.from_tensor_slices(unseen).map(prepare).batch(BATCH):
        eval_accuracy.update_state(targets, tf.cast(model(inputs, training=False) > 0.5, tf.int64))
    inline = [float(eval_accuracy.result()), float(eval_accuracy.count)]
    eval_accuracy.reset_state()
    eval_iterator = iter(coordinator.create_per_worker_dataset(eval_of_each_worker))
    for _ in range(5):
        coordinator.schedule(eval_step, args=(eval_iterator,))
    coordinator.join()
    print(json.dumps({"accuracies": accuracies, "counts": counts, "loss": float(loss), "inline": inline,
                      "on_workers": [float(eval_accuracy.result()), float(eval_accuracy.count)],
                      "steps": int(optimizer.iterations), "done": coordinator.done()}))
"""


@pytest.mark.part(LOOP, setup=SETUP)
def test_the_half_with_a_loop(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["steps"] == 5 * 20 + 1 and found["counts"] == [20 * 8] * 5
    assert found["accuracies"][-1] > 0.95 and found["loss"] < 0.5 and found["done"]
    assert found["inline"] == [1.0, 40] and found["on_workers"] == [1.0, 40]
