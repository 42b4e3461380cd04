"""What `parameter_server` does exactly: evaluating, predicting, saving, one worker, loops of one's own."""

from __future__ import annotations

import pytest
from coordinator_setup import ROWS, SETUP, STEPS, last_report

pytestmark = [pytest.mark.tensorflow, pytest.mark.parametrize("engine", ["parameter_server"])]

EVALUATE = """
    model = plain()
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    alone = sequential(keras.layers.Dense(8, activation="relu"))
    alone.compile("sgd", crossentropy, metrics=metrics())
    alone.set_weights(model.get_weights())
    def of_worker(context):
        own = tf.data.Dataset.from_tensor_slices((x, y))
        return own.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)
    plain(5).set_weights(model.get_weights())
    kinds = {
        "arrays": lambda: model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "tf.data": lambda: model.evaluate(data.batch(BATCH), verbose=0, return_dict=True),
        "several steps": lambda: plain(5).evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "steps": lambda: model.evaluate(data.repeat().batch(9), steps=10, verbose=0, return_dict=True),
        "a dataset of each worker": lambda: model.evaluate(
            strategy.distribute_datasets_from_function(of_worker), verbose=0, return_dict=True),
    }
    found = {name: [evaluate() for _ in range(3)] for name, evaluate in kinds.items()}
    report(alone=alone.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True), **found)
"""


@pytest.mark.part(EVALUATE, setup=SETUP)
def test_evaluate_is_that_of_one_process_every_time(printed: list[str]) -> None:
    found = last_report(printed)
    alone = found.pop("alone")
    assert alone["once"] == alone["seen"] == ROWS
    for kind, results in found.items():
        for result in results:
            # Other batches, or sums of several steps or of one worker, are added up otherwise: last bits may differ.
            same_order = kind in ("arrays", "tf.data")
            assert result == pytest.approx(alone, abs=1e-7 if same_order else 1e-6), kind
        if kind != "a dataset of each worker":  # There the order of the sums is that of the answers.
            assert results[0] == results[1] == results[2], kind


NOTIFIED = """
    from tfdistkit.strategies.parameter_server.inflight import InflightStep, step_ended
    step = tf.function(lambda number: number + 1)
    found = []
    for number in range(3):
        step_ended.clear()
        in_flight = InflightStep(strategy.schedule, step, (tf.constant(number),))
        found.append([step_ended.wait(60), in_flight.has_ended(), int(in_flight.result())])
    report(found=found)
"""


@pytest.mark.part(NOTIFIED, setup=SETUP)
def test_the_end_of_a_step_sets_the_event(printed: list[str]) -> None:
    """Without the event, steps would still be collected, but late: TensorFlow has changed what we hook."""
    assert last_report(printed)["found"] == [[True, True, number + 1] for number in range(3)]


LOST = """
    import collections, threading
    from tensorflow.python.distribute.coordinator.values import RemoteValueImpl
    fetch = RemoteValueImpl._copy_to_local
    threads = collections.Counter()
    def lose(which):
        calls = []
        def losing(value):
            calls.append(value)
            threads[threading.current_thread().name] += 1
            if len(calls) in which:
                raise tf.errors.UnavailableError(None, None, "the worker died with it")
            return fetch(value)
        RemoteValueImpl._copy_to_local = losing
    model = plain()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    threads.clear()
    before = int(model.optimizer.iterations.numpy())
    lose({3, 6, 7})
    history = model.fit(x, y, batch_size=BATCH, verbose=0).history
    steps, fetched_by = int(model.optimizer.iterations.numpy()) - before, dict(threads)
    lose(set(range(1000)))
    try:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    except tf.errors.UnavailableError as error:
        message = error.message
    RemoteValueImpl._copy_to_local = fetch
    after = model.fit(x, y, batch_size=BATCH, verbose=0).history["seen"]
    report(history=history, steps=steps, fetched_by=fetched_by, error=message, after=after)
"""


@pytest.mark.part(LOST, setup=SETUP)
def test_a_step_whose_result_is_lost_with_a_worker_runs_again(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["history"]["seen"] == found["history"]["once"] == [ROWS]
    assert found["steps"] == STEPS + 3
    assert sum(found["fetched_by"].values()) == STEPS + 3
    # The exception: TensorFlow's thread fetches results of steps that end before our hook is set.
    assert found["fetched_by"]["Results"] > STEPS, found["fetched_by"]
    assert "the worker died with it" in found["error"]
    assert found["after"] == [ROWS]


PREDICT = """
    model = plain()
    alone = sequential(keras.layers.Dense(8, activation="relu"))
    alone.set_weights(model.get_weights())
    expected = alone.predict(x, verbose=0)
    def of_worker(context):
        own = tf.data.Dataset.from_tensor_slices(x)
        return own.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)
    predicted = {
        "arrays": model.predict(x, batch_size=BATCH, verbose=0),
        "tf.data": model.predict(tf.data.Dataset.from_tensor_slices(x).batch(7), verbose=0),
        "several steps": plain(5).predict(x, batch_size=BATCH, verbose=0) if plain(5).set_weights(
            model.get_weights()) is None else None,
        "of workers": model.predict(strategy.distribute_datasets_from_function(of_worker), verbose=0),
    }
    report(apart={name: float(np.abs(p - expected).max()) for name, p in predicted.items()})
"""


@pytest.mark.part(PREDICT, setup=SETUP)
def test_predictions_are_those_of_one_process_in_order(printed: list[str]) -> None:
    assert last_report(printed)["apart"] == pytest.approx(dict.fromkeys(last_report(printed)["apart"], 0), abs=1e-6)
    assert len(last_report(printed)["apart"]) == 4


SAVE = """
    import os, subprocess, sys
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(),
                                  keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
        fresh = keras.models.clone_model(model)
        fresh.compile("adam", "mse", metrics=["mae"])
    model.fit(features, labels, batch_size=BATCH, epochs=2, verbose=0)
    path = str(folder / "model.keras")
    model.save(path)
    model.save_weights(str(folder / "model.weights.h5"))
    code = '''if True:
        import sys
        sys.modules["tfdistkit"] = None
        import json, keras, numpy as np
        model = keras.models.load_model(sys.argv[1])
        features, labels = np.load(sys.argv[2]), np.load(sys.argv[3])
        print(json.dumps([model.evaluate(features, labels, batch_size=8, verbose=0), int(model.optimizer.iterations),
                          model.predict(features, verbose=0)[:, 0].tolist()]))
    '''
    np.save(folder / "features.npy", features)
    np.save(folder / "labels.npy", labels)
    arrays = [str(folder / "features.npy"), str(folder / "labels.npy")]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    ended = subprocess.run([sys.executable, "-c", code, path, *arrays], env=environment, capture_output=True, text=True,
                           timeout=240)
    assert ended.returncode == 0, ended.stderr
    predicted = model.predict(features, verbose=0)
    evaluated = model.evaluate(features, labels, batch_size=BATCH, verbose=0)
    fresh.load_weights(str(folder / "model.weights.h5"))
    with strategy.scope():
        loaded = keras.models.load_model(path)
    again = [one.predict(features, verbose=0) for one in (fresh, loaded)]
    loaded.fit(features, labels, batch_size=BATCH, verbose=0)
    report(elsewhere=json.loads(ended.stdout.splitlines()[-1]), predicted=predicted[:, 0].tolist(), evaluated=evaluated,
         again=[float(np.abs(one - predicted).max()) for one in again], steps=int(loaded.optimizer.iterations))
"""


@pytest.mark.part(SAVE, setup=SETUP)
def test_a_saved_model_loads_in_plain_keras(printed: list[str]) -> None:
    found = last_report(printed)
    evaluated, steps, predicted = found["elsewhere"]
    assert evaluated == pytest.approx(found["evaluated"], abs=1e-6) and steps == 2 * STEPS
    assert predicted == pytest.approx(found["predicted"], abs=1e-6)
    assert found["again"] == [0, 0]
    assert found["steps"] == 3 * STEPS, "the optimizer goes on where it was"


ERRORS = """
    def negative(y, p):
        tf.debugging.assert_less(y[:, 1], 40.0, message="row 40 is not for us")
        return crossentropy(y, p)
    with strategy.scope():
        picky = sequential()
        picky.compile("sgd", negative, metrics=metrics())
    def broken_data():
        yield x[:BATCH], y[:BATCH]
        raise KeyError("no such file")
    broken = data.map(lambda a, b: (tf.debugging.check_numerics(a / 0.0, "a hole"), b)).batch(BATCH)
    def broken_workers(context):
        own = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        return own.map(lambda a, b: (tf.debugging.check_numerics(a / 0.0, "a hole in the data"), b))
    outside = data.batch(BATCH)
    failures = {
        "a step": lambda: picky.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0),
        "a step of evaluate": lambda: picky.evaluate(x, y, batch_size=BATCH, verbose=0),
        "a step of several": lambda: picky.fit(data.batch(BATCH), epochs=2, verbose=0),
        "tf.data": lambda: plain().fit(broken, verbose=0),
        "a generator": lambda: plain().fit(broken_data(), verbose=0),
        "a shape": lambda: make().fit(x[:, :3], y, verbose=0),
        "data of workers": lambda: plain().fit(strategy.distribute_datasets_from_function(broken_workers), verbose=0),
        "a dataset from outside": lambda: strategy.distribute_datasets_from_function(lambda context: outside),
        "a changed dataset": lambda: strategy.distribute_datasets_from_function(lambda context: outside.repeat()),
        "a callback": lambda: plain().fit(x, y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: 1 / 0)]),
    }
    found = {}
    for name, fail in failures.items():
        try:
            fail()
            found[name] = "nothing"
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
        found[f"after {name}"] = train(plain(), x, y, batch_size=BATCH, epochs=2)
    report(**found)
"""


@pytest.mark.part(ERRORS, setup=SETUP)
def test_errors_keep_their_type_and_the_next_fit_works(printed: list[str]) -> None:
    expected = {
        "a step": ("InvalidArgumentError", "row 40 is not for us"),
        "a step of evaluate": ("InvalidArgumentError", "row 40 is not for us"),
        "a step of several": ("InvalidArgumentError", "row 40 is not for us"),
        "tf.data": ("InvalidArgumentError", "a hole"),
        "a generator": ("KeyError", "no such file"),
        "a shape": ("ValueError", "expected axis -1 of input shape to have value 4"),
        "data of workers": ("InvalidArgumentError", "a hole in the data"),
        "a dataset from outside": ("UnsupportedError", "`dataset_fn` must not use a dataset"),
        "a changed dataset": ("UnsupportedError", "`dataset_fn` must not use a dataset"),
        "a callback": ("ZeroDivisionError", "division by zero"),
    }
    found = last_report(printed)
    for name, (kind, message) in expected.items():
        assert found[name][0] == kind and message in found[name][1], (name, found[name])
        after = found[f"after {name}"]
        assert after["seen"] == after["once"] == [ROWS] * 2, name
        assert after["steps"] == 2 * STEPS and after["used"] == [2] * ROWS, name


LOOP = """
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer, rows, mean = keras.optimizers.SGD(0.05), keras.metrics.Sum(), keras.metrics.Mean()
    def of_worker(context):
        return tf.data.Dataset.from_tensor_slices((features, labels)).repeat().batch(BATCH)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(of_worker)))
    @tf.function
    def step(iterator):
        def replica(batch):
            inputs, targets = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs, training=True)[:, 0] - targets) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            rows.update_state(tf.ones_like(targets))
            mean.update_state(loss)
            return loss
        return strategy.run(replica, args=(next(iterator),))
    first = coordinator.schedule(step, args=(iterator,)).fetch()
    for _ in range(199):
        last = coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    with strategy.scope():
        alone, total = keras.metrics.Sum(), keras.Variable(0.0, trainable=False)
    @tf.function
    def without_run(value):
        alone.update_state(value)
        total.assign_add(value)
    for _ in range(200):
        coordinator.schedule(without_run, args=(tf.constant(1.0),))
    coordinator.join()
    report(without_run=[float(alone.result()), float(total.numpy())],
           steps=int(optimizer.iterations), rows=float(rows.result()), counted=float(mean.count),
         losses=[float(first), float(last.fetch())], done=coordinator.done(), same=coordinator is strategy.coordinator)
"""


@pytest.mark.part(LOOP, setup=SETUP)
def test_a_loop_with_a_cluster_coordinator(printed: list[str]) -> None:
    found = last_report(printed)
    # Every batch of the repeated data has 8 rows: `repeat` comes before `batch`.
    assert (found["steps"], found["rows"], found["counted"]) == (200, 1600, 200)
    assert found["without_run"] == [200, 200]
    assert found["losses"][1] < found["losses"][0] and found["done"] and found["same"]


ONE_WORKER = """
    class Decay(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.9)
    found = {}
    for name, optimizer in {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}.items():
        for more in ([], [keras.layers.BatchNormalization]):
            here = sequential(keras.layers.Dense(8), *(layer() for layer in more))
            here.compile(optimizer(), crossentropy, metrics=metrics())
            there = make(lambda: keras.layers.Dense(8), *more, optimizer=optimizer)
            there.set_weights(here.get_weights())
            apart = {}
            for steps in (3, 12):
                batches = data.batch(BATCH).take(steps)
                histories = [m.fit(batches, verbose=0, callbacks=[Decay()]).history for m in (here, there)]
                apart[steps] = max(float(np.abs(a - b).max()) for a, b in zip(here.get_weights(), there.get_weights()))
            found[name + " and BatchNormalization" * len(more)] = {"apart": apart, "histories": histories}
    def all_rows(context):
        own = tf.data.Dataset.from_tensor_slices((x, y))
        return own.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)
    own = train(plain(), strategy.distribute_datasets_from_function(all_rows))
    report(optimizers=found, own=own)
"""


@pytest.mark.parametrize("world_size", [1])
@pytest.mark.part(ONE_WORKER, setup=SETUP)
def test_one_worker_is_one_process(printed: list[str]) -> None:
    found = last_report(printed)
    for name, one in found["optimizers"].items():
        # Adding the change of a moving average rounds differently from computing the average.
        assert one["apart"]["3"] <= (1e-6 if "Norm" in name else 0), name
        assert one["apart"]["12"] < 1e-6, name
        assert one["histories"][1] == {k: pytest.approx(v, abs=1e-6) for k, v in one["histories"][0].items()}
    assert len(found["optimizers"]) == 4
    assert found["own"]["once"] == [ROWS] * 3 and found["own"]["used"] == [3] * ROWS


# TensorFlow's own strategy instead of ours: the coordinator reconnects to the same workers.
LOST = """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    stock = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(stock)
    with stock.scope():
        rows, optimizer = keras.metrics.Sum(), keras.optimizers.SGD()
        weight = keras.Variable([1.0, 2.0])
        optimizer.build([weight])
    @tf.function
    def step():
        def replica():
            rows.update_state(tf.ones((8,)))
            optimizer.apply([tf.constant([0.1, 0.1])], [weight])
        stock.run(replica)
    counted = []
    for attempt in range(1, 31):
        for _ in range(200):
            coordinator.schedule(step)
        coordinator.join()
        counted.append([int(optimizer.iterations), float(rows.result())])
        if counted[-1][0] < 200 * attempt and counted[-1][1] < 1600 * attempt:
            break
    report(counted=counted)
"""


@pytest.mark.part(LOST, setup=SETUP, ends_job=True)
def test_tensorflow_without_us_loses_updates(printed: list[str]) -> None:
    counted = last_report(printed)["counted"]
    steps, rows = counted[-1]
    assert steps < 200 * len(counted) and rows < 1600 * len(counted)
