"""`StopTogether` in jobs of two ranks: if one stops, all stop at the same step, and none hangs."""

from __future__ import annotations

import pytest
from rank_jobs import ENGINES

pytestmark = pytest.mark.tensorflow

TRAIN = """
    import functools
    import keras, numpy as np, tensorflow as tf
    from tfdistkit.callbacks import StopTogether
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = x[:, :1] * 2

    class Stop(keras.callbacks.Callback):
        "Stops on one rank, in one of Keras's calls."
        def __init__(self, hook, at, rank):
            super().__init__()
            if tfdistkit.rank() == rank:
                setattr(self, hook, lambda number, logs=None: self.stop() if number == at else None)
        def stop(self):
            self.model.stop_training = True

    class Steps(keras.callbacks.Callback):
        "Where it stopped: epoch and batch."
        def on_train_begin(self, logs=None):
            self.ended = False
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch
        def on_train_batch_end(self, batch, logs=None):
            self.batch = batch
        def on_train_end(self, logs=None):
            self.ended = True

    @functools.cache  # Traced once.
    def compiled(steps_per_execution):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        return model

    def train(*callbacks, steps_per_execution=1, epochs=3):
        model = compiled(steps_per_execution)
        model.optimizer.iterations.assign(0)
        steps = Steps()
        model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, validation_data=(x[:16], y[:16]),
                  callbacks=[steps, *callbacks])
        assert steps.ended and model.stop_training
        found = [steps.epoch, steps.batch, int(model.optimizer.iterations)]
        both = strategy.gather(tf.constant([found], tf.int64), axis=0).numpy()
        assert (both == both[0]).all(), both
        return found
"""

WHERE = (
    TRAIN
    + """
    for one in (0, 1):
        # 8 batches an epoch. As the last of the list, and around what stops.
        assert train(Stop("on_train_batch_end", 2, one), StopTogether()) == [0, 2, 3]
        assert train(StopTogether(Stop("on_train_batch_end", 2, one)), Steps()) == [0, 2, 3]
        assert train(Stop("on_train_batch_begin", 2, one), StopTogether()) == [0, 2, 3]
        assert train(StopTogether(Stop("on_epoch_begin", 1, one))) == [1, 0, 9]
        assert train(StopTogether(Stop("on_epoch_end", 1, one))) == [1, 7, 16]
        assert train(StopTogether(Stop("on_test_batch_end", 1, one))) == [0, 7, 8]
        assert train(StopTogether(Stop("on_train_batch_end", 7, one))) == [0, 7, 8]
    # With fewer checks, a stop waits for the next check.
    assert train(StopTogether(Stop("on_train_batch_end", 3, 1), check_every=3)) == [0, 5, 6]
    assert train(StopTogether(Stop("on_train_batch_end", 6, 1), check_every=3)) == [0, 7, 8]
    assert train(StopTogether(Stop("on_train_batch_end", 3, 1), check_every="epoch")) == [0, 7, 8]
    assert train(Stop("on_train_batch_end", 3, 0), StopTogether(check_every=100)) == [0, 7, 8]
    # With several steps in an execution, after the execution.
    assert train(StopTogether(Stop("on_train_batch_end", 2, 1)), steps_per_execution=3) == [0, 2, 3]
    assert train(StopTogether(Stop("on_train_batch_end", 5, 1), check_every=2), steps_per_execution=3) == [0, 5, 6]
    # Both at once, and at different times.
    both = StopTogether(Stop("on_train_batch_end", 4, 0), Stop("on_train_batch_end", 3, 1))
    assert train(both) == [0, 3, 4]
    # The same callback again, and no rank stops: all epochs run.
    try:
        train(StopTogether())
    except AssertionError:
        print("all epochs")
    print("together")
"""
)

KERAS = (
    TRAIN
    + """
    class OwnNumbers(keras.callbacks.Callback):
        "Numbers that differ by rank, for the callbacks after it."
        def on_train_batch_end(self, batch, logs=None):
            if rank == 1 and batch == 4:
                logs["loss"] = float("nan")
        def on_epoch_end(self, epoch, logs=None):
            logs["own"] = 1.0 if rank == 0 and epoch else 1.0 / (1 + epoch)
    nan = keras.callbacks.TerminateOnNaN
    assert train(StopTogether(OwnNumbers(), nan())) == [0, 4, 5]
    assert train(OwnNumbers(), nan(), StopTogether()) == [0, 4, 5]
    early = keras.callbacks.EarlyStopping(monitor="own", mode="min", patience=2)
    assert train(StopTogether(OwnNumbers(), early), epochs=9) == [2, 7, 24]
    assert (early.stopped_epoch == 2) == (rank == 0)
    print("together")
"""
)

ORDER = (
    TRAIN
    + """
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    def refused(*callbacks):
        try:
            model.fit(x, y, callbacks=list(callbacks), verbose=1)
        except tfdistkit.errors.UnsupportedError as error:
            return str(error)
        raise SystemExit("not refused")
    message = refused(StopTogether(), keras.callbacks.EarlyStopping(monitor="loss"))
    assert "EarlyStopping must not come after StopTogether" in message, message
    assert "callbacks=[StopTogether, EarlyStopping]" in message, message
    assert "StopTogether(EarlyStopping(...))" in message, message
    assert "Stop must not come after" in refused(StopTogether(), Stop("on_train_batch_end", 2, rank))
    assert "Steps must not come after" in refused(StopTogether(), Steps())
    prints = keras.callbacks.LambdaCallback(on_epoch_end=print)
    assert "LambdaCallback must not come after" in refused(StopTogether(), prints)
    assert "TerminateOnNaN must not come after" in refused(StopTogether(Steps()), keras.callbacks.TerminateOnNaN())
    if tfdistkit.is_chief():
        try:
            only = tfdistkit.callbacks.ChiefOnly(StopTogether())
            keras.callbacks.CallbackList([only], model=model).on_train_begin()
        except tfdistkit.errors.UnsupportedError as error:
            assert "not inside another callback" in str(error)
        else:
            raise SystemExit("not refused")
    # Callbacks that cannot stop may come later; after a StopTogether that wraps callbacks, any may.
    begin = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: None)
    model.fit(x, y, callbacks=[StopTogether(), begin])
    model.fit(x, y, callbacks=[StopTogether(Stop("on_train_batch_end", 0, 1)), Steps()])
    print("refused")
"""
)


on_two_ranks = pytest.mark.parametrize("engine", ENGINES)


@pytest.mark.part(WHERE)
@on_two_ranks
def test_all_ranks_stop_when_one_stops(printed: list[str]) -> None:
    assert all("all epochs\ntogether\n" in text for text in printed)


@pytest.mark.part(KERAS)
@on_two_ranks
def test_keras_callbacks_on_logs_of_one_rank(printed: list[str]) -> None:
    assert all(text.endswith("together\n") for text in printed)


@pytest.mark.part(ORDER)
@on_two_ranks
def test_a_wrong_order_is_refused_before_training(printed: list[str]) -> None:
    assert all(text.endswith("refused\n") for text in printed)
