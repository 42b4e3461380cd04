"""`ChiefOnly`: a callback that only the chief needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdistkit.callbacks.chief import writes_files
from tfdistkit.errors import OptionError, UnsupportedError, explain

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
# Where the learning rate is looked at: reading it after every batch would cost.
_EPOCH_HOOKS = frozenset({"on_train_begin", "on_epoch_begin", "on_epoch_end"})

# Callbacks of Keras that every rank must run, and why.
_FOR_EVERY_RANK = {
    "EarlyStopping": "it stops training: the other ranks would go on and wait for the chief",
    "TerminateOnNaN": "it stops training: the other ranks would go on and wait for the chief",
    "LearningRateScheduler": "it sets the learning rate: the ranks' weights would drift apart",
    "ReduceLROnPlateau": "it sets the learning rate: the ranks' weights would drift apart",
    "SwapEMAWeights": "it sets the weights: the ranks' weights would drift apart",
    "BackupAndRestore": "it sets the weights and the first epoch: the ranks would drift apart",
}
# Callbacks of Keras with something better here.
_INSTEAD = {
    "ModelCheckpoint": "Use tfdistkit.callbacks.ChiefCheckpoint, on every rank.",
    "ProgbarLogger": "Leave it out: under a strategy of tfdistkit, `fit` shows one progress bar for the job.",
}


class ChiefOnly(keras.callbacks.Callback):
    """Runs another callback on the chief alone: TensorBoard, CSVLogger, RemoteMonitor, your own.

    Safe is what looks at logs, and what reads weights and optimizer variables (every rank holds them all).
    Not safe is what needs the other ranks: `model.fit`, `evaluate` and `predict`, and reading a metric
    (`metric.result()`) are collectives, and the chief would wait in them for the others. Not allowed is what
    steers training: see Raises.

    Args:
        callback: The callback. On the other ranks none of its methods is called.

    Raises:
        OptionError: (a ValueError) if `callback` is one of Keras's that must run on every rank: those that
            stop training, or set the learning rate or the weights.
        UnsupportedError: (a RuntimeError) in training, on the chief, if another callback does so.

    Example:
        ```python
        model.fit(dataset, callbacks=[tfdistkit.callbacks.ChiefOnly(keras.callbacks.CSVLogger("log.csv"))])
        ```
    """

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        _check(callback)
        self.callback = callback

    @property
    def async_safe(self) -> bool:
        """Whether Keras need not wait for a batch before it starts the next: as for the callback inside."""
        if getattr(self.callback, "async_safe", False):
            return True
        nothing = keras.callbacks.Callback
        hooks = ("on_batch_end", "on_train_batch_end", "on_test_batch_end", "on_predict_batch_end")
        return all(getattr(type(self.callback), hook) is getattr(nothing, hook) for hook in hooks)

    def set_params(self, params: dict[str, Any]) -> None:
        """Called by Keras."""
        super().set_params(params)
        if writes_files(self.model):
            self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras."""
        super().set_model(model)
        if writes_files(model):
            self.callback.set_model(model)

    def _run(self, hook: str, *args: Any, **kwargs: Any) -> None:
        if not writes_files(self.model):
            return
        before = self._steering(hook)
        getattr(self.callback, hook)(*args, **kwargs)
        for what, value in self._steering(hook).items():
            if value != before[what]:
                raise UnsupportedError(
                    explain(
                        f"A callback in ChiefOnly changed {what} on the chief alone: the ranks would drift apart.",
                        received=f"{type(self.callback).__name__}.{hook}: {before[what]} -> {value}",
                        expected="callbacks that steer training to run on every rank",
                        do=f"Give {type(self.callback).__name__} to `fit` without ChiefOnly.",
                    )
                )

    def _steering(self, hook: str) -> dict[str, Any]:
        """What of the model steers training."""
        found: dict[str, Any] = {"`model.stop_training`": bool(getattr(self.model, "stop_training", False))}
        optimizer = getattr(self.model, "optimizer", None)
        if hook in _EPOCH_HOOKS and optimizer is not None:
            found["the learning rate"] = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        return found


def _forwarding(hook: str) -> Callable[..., None]:
    def run(self: ChiefOnly, *args: Any, **kwargs: Any) -> None:
        self._run(hook, *args, **kwargs)

    run.__name__ = hook
    return run


for _hook in _HOOKS:
    setattr(ChiefOnly, _hook, _forwarding(_hook))


def _check(callback: Any) -> None:
    received = f"ChiefOnly({type(callback).__name__})"
    if not isinstance(callback, keras.callbacks.Callback):
        raise OptionError(explain("`callback` is no callback.", received=received, expected="a keras callback"))
    for name, why in _FOR_EVERY_RANK.items():
        if isinstance(callback, getattr(keras.callbacks, name)):
            do = f"Give {type(callback).__name__} to `fit` without ChiefOnly, on every rank."
            raise OptionError(explain(f"{name} cannot run on the chief alone: {why}.", received=received, do=do))
    for name, do in _INSTEAD.items():
        if isinstance(callback, getattr(keras.callbacks, name)):
            raise OptionError(explain(f"{name} in ChiefOnly is not what you want.", received=received, do=do))
