"""Runs a program under a given strategy, and records its results."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from fuzz import (
    callback_list,
    feeding,
    loops,
    networks,
    number_losses,
    objectives,
    stateful_steps,
    training_steps,
    whole_models,
)
from fuzz.programs import Program


class Session:
    """One program in one process.

    Args:
        program: The program.
        strategy: That of a program without any, or one of ours.
        folder: Where it may leave files; the same on all ranks.
        interrupts: Whether the interruption of the program happens here; not in the reference.
        trains: Whether it trains; else all it does is `evaluate` and `predict`, with the first weights.
    """

    def __init__(self, program: Program, strategy: Any, folder: str, interrupts: bool, trains: bool = True):
        self.program, self.strategy, self.folder = program, strategy, folder
        self.interrupts, self.trains = interrupts, trains
        self.values: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self._act = 0

    def run(self) -> None:
        """Runs all acts, and records the weights after the last one."""
        if self.program.step in loops.LOOPS:
            loops.LOOPS[self.program.step](self)
            return
        self.begin()
        for self._act, name in enumerate(self.program.acts):  # noqa: B020
            if self.trains or name in NO_TRAINING:
                ACTS[name](self)
        self.keep_weights("weights", self.model.weights)
        if hasattr(self.model, "own_state"):
            self.arrays["kept by the step"] = np.asarray(keras.ops.convert_to_numpy(self.model.own_state))
        for name in ("optimizer", "other_optimizer", "critic_optimizer", "generator_optimizer"):
            optimizer = getattr(self.model, name, None)
            if optimizer is not None and optimizer.built and self.trains:
                self.keep_weights(f"{name}_state", optimizer.variables)

    def begin(self) -> None:
        """Makes the model, as the first lines of a script do."""
        program = self.program
        keras.utils.set_random_seed(program.seed)
        with self.strategy.scope():
            if program.step in whole_models.MODELS:
                self.model = whole_models.make_whole_model(program)
            else:
                steps = stateful_steps if program.state else number_losses
                step = training_steps.STEPS.get(program.step) or steps.step_of(program)
                self.model = networks.make_network(program, step)
                if program.step == "accumulating" and self.model.built:
                    self.model._make_sums()
            self.compile()

    def compile(self) -> None:
        """Compiles the model."""
        arguments = objectives.compile_arguments(self.program)
        if self.program.step not in {"keras", "own_test_step", *training_steps.COMPILED}:
            arguments = {name: value for name, value in arguments.items() if name not in _OF_KERAS_STEP}
        self.model.compile(**arguments)

    def callbacks(self) -> list[Any]:
        """Makes the callbacks of the program."""
        program = self.program
        own = (
            program.step in (*training_steps.OWN_LOSS, *number_losses.STEPS, "stateful")
            or program.step in whole_models.MODELS
        )
        monitor = _MONITORED.get(program.step, "own_loss" if own else "loss")
        has_validation = program.validation and program.step not in ("wgan", "distiller")
        return callback_list.make_callbacks(program.callbacks, f"val_{monitor}" if has_validation else monitor)

    def keep_logs(self, name: str, logs: Any) -> None:
        """Records named numbers, or named lists of numbers."""
        kept = {key: np.asarray(value, "float64").tolist() for key, value in logs.items()}
        self.values[f"{self._act} {name}"] = kept

    def keep_weights(self, name: str, variables: Any) -> None:
        """Records variables, except states of random generators, which differ between replicas."""
        for variable in variables:
            # Optimizers name their state by where they are first built, which differs under a strategy.
            key = f"{name}.{variable.path.rsplit('/', 1)[-1] if name.endswith('_state') else variable.path}"
            if "seed" not in variable.path:
                key += f"#{sum(known.startswith(key) for known in self.arrays)}" if key in self.arrays else ""
                self.arrays[key] = np.asarray(keras.ops.convert_to_numpy(variable))

    def keep_arrays(self, name: str, values: Any) -> None:
        """Records nested arrays."""
        for number, value in enumerate(tf.nest.flatten(values)):
            self.arrays[f"{self._act} {name}.{number}"] = np.asarray(value)


_OF_KERAS_STEP = ("loss", "metrics", "weighted_metrics", "loss_weights")
_MONITORED = {
    "bare": "loss",
    "bare_logs": "loss",
    "own_compute_loss": "loss",
    "numbers_compute_loss": "loss",
    "own_test_step": "loss",
    "vae": "total_loss",
    "wgan": "critic_loss",
    "distiller": "distillation",
}


def _fit(session: Session) -> None:
    program = session.program
    if program.interrupt and session.interrupts and session._act == 0:
        history = _interrupted_fit(session)
    else:
        arguments, callbacks = feeding.fit_arguments(program), session.callbacks()
        if program.distributed:
            arguments["x"] = session.strategy.experimental_distribute_dataset(arguments["x"])
        history = session.model.fit(**arguments, callbacks=callbacks).history
        for callback in callbacks:
            if isinstance(callback, callback_list.LogsOfBatches) and not program.interrupt:
                names = callback.seen[0] if callback.seen else {}
                session.keep_logs("batch_logs", {n: [log.get(n, np.nan) for log in callback.seen] for n in names})
    session.keep_logs("history", history)


def _interrupted_fit(session: Session) -> Any:
    """A `fit` that is interrupted, and the `fit` of the restarted script."""
    import tfdistkit

    program = session.program
    backup = {"backup_dir": os.path.join(session.folder, "backup"), "save_freq": program.save_every}
    interrupt = callback_list.InterruptAfter(program.interrupt)
    try:
        callbacks = [*session.callbacks(), tfdistkit.callbacks.BackupAndResume(**backup), interrupt]
        session.model.fit(**feeding.fit_arguments(program), callbacks=callbacks)
    except callback_list.Interrupted:
        pass
    keras.utils.clear_session()
    session.begin()
    callbacks = [*session.callbacks(), tfdistkit.callbacks.BackupAndResume(**backup)]
    return session.model.fit(**feeding.fit_arguments(program), callbacks=callbacks).history


def _fit_again(session: Session) -> None:
    """Recompiles with another optimizer, and continues training."""
    with session.strategy.scope():
        session.compile()
    _fit(session)


def _evaluate(session: Session) -> None:
    logs = session.model.evaluate(**feeding.evaluate_arguments(session.program), verbose=0, return_dict=True)
    session.keep_logs("evaluate", logs)


def _predict(session: Session) -> None:
    session.keep_arrays("predict", session.model.predict(**feeding.predict_arguments(session.program), verbose=0))


def _train_on_batch(session: Session) -> None:
    program, logs = session.program, []
    weights = {"class_weight": feeding.CLASS_WEIGHTS} if program.weights == "classes" else {}
    for batch in _batches(session):
        logs.append(session.model.train_on_batch(*batch, return_dict=True, **weights))
    session.keep_logs("train_on_batch", {name: [float(log[name]) for log in logs] for name in logs[0]})


def _test_on_batch(session: Session) -> None:
    session.model.reset_metrics()
    logs = [session.model.test_on_batch(*batch, return_dict=True) for batch in _batches(session)]
    session.keep_logs("test_on_batch", {name: [float(log[name]) for log in logs] for name in logs[0]})


def _predict_on_batch(session: Session) -> None:
    for number, batch in enumerate(_batches(session)):
        session.keep_arrays(f"predict_on_batch{number}", session.model.predict_on_batch(batch[0]))


def _batches(session: Session) -> Any:
    program, data = session.program, feeding.columns(session.program)
    if program.inputs == "ragged":
        return (batch if isinstance(batch, tuple) else (batch,) for batch in feeding.dataset(program, data))
    return feeding.batches(program, data)


def _save_and_load(session: Session) -> None:
    """Saves the weights and the optimizer's state, and continues with a new model that loads them."""
    path = os.path.join(session.folder, f"saved{session._act}.{os.getpid()}.weights.h5")
    session.model.save_weights(path)
    trained = session.model
    if session.program.step in whole_models.MODELS:
        return
    session.begin()
    if not session.model.built:
        session.model = trained
        return
    with session.strategy.scope():
        session.model.optimizer.build(session.model.trainable_variables)
    session.model.load_weights(path)


ACTS = {
    "fit": _fit,
    "fit_again": _fit_again,
    "evaluate": _evaluate,
    "predict": _predict,
    "train_on_batch": _train_on_batch,
    "test_on_batch": _test_on_batch,
    "predict_on_batch": _predict_on_batch,
    "save_and_load": _save_and_load,
}
NO_TRAINING = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
