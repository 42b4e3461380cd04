"""`StopTogether`: stops all ranks at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdistkit.callbacks.process_group import Ranks, list_of, ranks_of, warn_once
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.validation import is_integer

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
# The hooks after which `fit` reads `model.stop_training`.
_STOPPING = ("on_batch_end", "on_train_batch_end", "on_epoch_end")
# Keras itself appends these to the list.
_OF_KERAS = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
_STOPPERS = (keras.callbacks.EarlyStopping, keras.callbacks.TerminateOnNaN)


class StopTogether(keras.callbacks.Callback):
    """Stops all ranks at the same step when one of them stops.

    If one rank stops alone (`model.stop_training = True` in your own callback, for a time limit or a full disk;
    `EarlyStopping` or `TerminateOnNaN` on logs that only this rank has), its peers hang in their next step. With
    this callback all ranks compare `stop_training` at the end of each batch, and stop there together.

    Either wrap the callbacks that stop, or put it without arguments at the end of the list: it does not see
    stops by callbacks after it. Every rank must have it. `EarlyStopping` and `TerminateOnNaN` on Keras's logs do
    not need it under a tfdistkit strategy, because all ranks have the same logs; with an `algorithm` (`LocalSGD`) only
    those of an epoch, so `TerminateOnNaN` needs it.

    Args:
        *callbacks: Callbacks to run first, in this order.
        check_every: Number of batches between two checks (of executions, with `steps_per_execution`), or
            `"epoch"`. The end of an epoch is always a check. A stop takes effect at the next check. A check is
            one collective of one number, so it costs about the network's latency.

    Raises:
        OptionError: (a ValueError) if an argument is invalid.
        UnsupportedError: (a RuntimeError) when training begins, if a callback that can stop comes later in
            the list.

    Example:
        ```python
        stop = tfdistkit.callbacks.StopTogether(StopWhenTimeIsUp(hours=3))
        model.fit(dataset, callbacks=[tfdistkit.callbacks.ChiefCheckpoint("last.keras"), stop])
        ```
    """

    def __init__(self, *callbacks: keras.callbacks.Callback, check_every: int | str = 1):
        super().__init__()
        for one in callbacks:
            if not isinstance(one, keras.callbacks.Callback):
                raise OptionError(
                    explain(
                        "`callbacks` must be keras.callbacks.Callback objects.",
                        received=repr(one),
                        do="Pass them one by one, without a list: StopTogether(callback, another).",
                    )
                )
        given: Any = check_every
        if given != "epoch" and not (is_integer(given) and given > 0):
            raise OptionError(
                explain(
                    '`check_every` must be an integer >= 1, or "epoch".',
                    received=f"check_every={check_every!r}",
                )
            )
        self.callbacks = list(callbacks)
        self.check_every = check_every
        self._ranks: Ranks | None = None
        self._wants_to_stop = False
        self._batches = 0

    def set_params(self, params: dict[str, Any]) -> None:
        """Called by Keras."""
        super().set_params(params)
        for one in self.callbacks:
            one.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras."""
        super().set_model(model)
        for one in self.callbacks:
            one.set_model(model)

    def _run(self, hook: str, *args: Any, **kwargs: Any) -> None:
        if hook == "on_train_begin":
            self._begin()
        for one in self.callbacks:
            getattr(one, hook)(*args, **kwargs)
        if hook == "on_train_batch_end":
            self._batches += 1
            self._check(now=self.check_every != "epoch" and self._batches % int(self.check_every) == 0)
        elif hook == "on_epoch_end":
            self._check(now=True)

    def _begin(self) -> None:
        self._ranks = ranks_of(self.model)
        self._wants_to_stop, self._batches = False, 0
        if self._ranks.is_single:
            warn_once("StopTogether has nothing to do: there is one process.")
            return
        self._require_order(list_of(self))

    def _check(self, now: bool) -> None:
        if self._ranks is None or self._ranks.is_single:
            return
        self._wants_to_stop = self._wants_to_stop or bool(self.model.stop_training)
        # Held back until the next check: `fit` would stop here, on this rank only.
        self.model.stop_training = now and self._ranks.any(self._wants_to_stop)

    def _require_order(self, in_list: list[keras.callbacks.Callback] | None) -> None:
        if in_list is None:
            return  # Called by the user's own training loop.
        if not any(one is self for one in in_list):
            raise UnsupportedError(
                explain(
                    "StopTogether must be in the list of callbacks of `fit`, not inside another callback.",
                    received=f"callbacks=[{_names(in_list)}]",
                    do="Pass it to `fit` directly.",
                )
            )
        after = in_list[[one is self for one in in_list].index(True) + 1 :]
        can_stop = _is_stopper if self.callbacks else _may_stop
        late = [one for one in after if can_stop(one)]
        if late:
            name = type(late[0]).__name__
            raise UnsupportedError(
                explain(
                    f"{name} must not come after StopTogether, which does not see stops by later callbacks.",
                    received=f"callbacks=[{_names(in_list)}]",
                    do=f"Put StopTogether() last, or wrap the callback that stops: StopTogether({name}(...)).",
                )
            )


def _names(callbacks: list[keras.callbacks.Callback]) -> str:
    return ", ".join(type(one).__name__ for one in callbacks if not isinstance(one, _OF_KERAS))


def _is_stopper(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, _STOPPERS)


def _may_stop(callback: keras.callbacks.Callback) -> bool:
    if type(callback) in _OF_KERAS or getattr(callback, "tfdistkit_stops_all_ranks", False):
        return False
    nothing = keras.callbacks.Callback
    # A LambdaCallback has its hooks in the object, not in the class.
    hooks = {hook: getattr(callback, hook) for hook in _STOPPING}
    return any(getattr(own, "__func__", own) is not getattr(nothing, hook) for hook, own in hooks.items())


def _forwarding(hook: str) -> Callable[..., None]:
    def run(self: StopTogether, *args: Any, **kwargs: Any) -> None:
        self._run(hook, *args, **kwargs)

    run.__name__ = hook
    return run


for _hook in _HOOKS:
    setattr(StopTogether, _hook, _forwarding(_hook))
