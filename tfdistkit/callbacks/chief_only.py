"""`ChiefOnly`: runs another callback on the chief only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdistkit.callbacks.chief import writes_files
from tfdistkit.errors import OptionError, UnsupportedError, explain

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
# Hooks that check the learning rate: reading it after every batch would be slow.
_EPOCH_HOOKS = frozenset({"on_train_begin", "on_epoch_begin", "on_epoch_end"})

# Keras callbacks that every rank must run, and why.
_FOR_EVERY_RANK = {
    "EarlyStopping": "it stops training, and the other ranks would wait for the chief in their next step",
    "TerminateOnNaN": "it stops training, and the other ranks would wait for the chief in their next step",
    "LearningRateScheduler": "it sets the learning rate, and the ranks' weights would diverge",
    "ReduceLROnPlateau": "it sets the learning rate, and the ranks' weights would diverge",
    "SwapEMAWeights": "it sets the weights, which would diverge between the ranks",
    "BackupAndRestore": "it sets the weights and the first epoch, which would diverge between the ranks",
}
# Keras callbacks with a replacement.
_INSTEAD = {
    "ModelCheckpoint": "Use tfdistkit.callbacks.ChiefCheckpoint, on every rank.",
    "ProgbarLogger": "Leave it out: under a strategy of tfdistkit, `fit` shows one progress bar for the job.",
}


class ChiefOnly(keras.callbacks.Callback):
    """Runs another callback on the chief only: TensorBoard, CSVLogger, RemoteMonitor, your own.

    The callback may read logs, weights and optimizer variables (every rank holds all of them). It must not call
    collectives: `model.fit`, `evaluate`, `predict` and `metric.result()` would wait for the other ranks. It must
    not change training either: see Raises.

    Args:
        callback: The callback. On the other ranks none of its methods is called.

    Raises:
        OptionError: (a ValueError) if `callback` is a Keras callback that must run on every rank, because it
            stops training, or sets the learning rate or the weights.
        UnsupportedError: (a RuntimeError) in training, on the chief, if another callback does this.

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
        """Whether Keras may start the next batch before this one ends: as for the wrapped callback."""
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
                        f"A callback in ChiefOnly must not change {what}: the ranks would diverge.",
                        received=f"{type(self.callback).__name__}.{hook}: {before[what]} -> {value}",
                        do=f"Give {type(self.callback).__name__} to `fit` without ChiefOnly.",
                    )
                )

    def _steering(self, hook: str) -> dict[str, Any]:
        """Returns the settings of the model that a callback on one rank must not change."""
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
        raise OptionError(explain("`callback` must be a keras.callbacks.Callback.", received=received))
    for name, why in _FOR_EVERY_RANK.items():
        if isinstance(callback, getattr(keras.callbacks, name)):
            do = f"Give {type(callback).__name__} to `fit` without ChiefOnly, on every rank."
            raise OptionError(explain(f"{name} must run on every rank: {why}.", received=received, do=do))
    for name, do in _INSTEAD.items():
        if isinstance(callback, getattr(keras.callbacks, name)):
            raise OptionError(explain(f"{name} must not be in ChiefOnly.", received=received, do=do))
