"""Compares the setup of a training (model, optimizer, loss, metrics, data) with the run of a backup."""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfdistkit import env
from tfdistkit.callbacks.backup.description import describe, differences
from tfdistkit.callbacks.backup.model_state import hash_of_weights, optimizers_of, value_of
from tfdistkit.callbacks.backup.plain_data import fingerprint
from tfdistkit.callbacks.backup.training_description import setup_of_data, setup_of_model
from tfdistkit.callbacks.process_group import Ranks
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api

_LOG = logging.getLogger(__name__)

_MOST_SHOWN = 8


class SetUp:
    """The setup of a training, compared with the run of a backup.

    Args:
        model: The model that `fit` trains.
        arguments: The arguments of `fit`.
        ranks: The process group.
        accept_changes: Whether differences are accepted instead of raised.
    """

    def __init__(self, model: keras.Model, arguments: dict[str, Any], ranks: Ranks, accept_changes: bool):
        self._model, self._ranks, self._accepts_changes = model, ranks, accept_changes
        self._kept_rates: list[int] = []
        self._compiled: list[Any] = []
        self.has_same_optimizers = self.has_same_counts = True
        self.now: dict[str, Any] = {
            "data": setup_of_data(arguments, ranks.size), "learning_rates": learning_rates_of(model),
        }  # fmt: skip

    def identity(self) -> str | None:
        """Returns a hash of the setup and of the weights at the begin; all ranks call it. None for an unbuilt model."""
        weights = hash_of_weights(self._model)
        if weights is None:
            return None
        return weights + fingerprint({**self.now, **setup_of_model(self._model)}).hex()

    def describe_model(self) -> None:
        """Adds the description of the built model."""
        self.now.update(setup_of_model(self._model))
        self._compiled = _compiled(self._model)

    def require_same_compile(self) -> None:
        """Raises an error if the model was compiled anew since `describe_model`.

        Raises:
            UnsupportedError: if its optimizer, loss or metrics are others.
        """
        if _compiled(self._model) != self._compiled:
            raise UnsupportedError(
                explain(
                    "A model must not be compiled anew within a `fit` with BackupAndResume: a restarted script begins "
                    "with the optimizer, loss and metrics of before, into which a backup cannot be restored.",
                    received=f"a call of `{self._model.name}.compile` by a callback",
                    do="Train in phases, one `fit` for each: model.fit(..., epochs=2), model.compile(...), "
                    "model.fit(..., initial_epoch=2), each with BackupAndResume.",
                )
            )

    def has_other_data(self, then: dict[str, Any] | None, is_chief: bool) -> bool:
        """Compares this setup with the run of a backup; all ranks call it.

        Args:
            then: `now` of that run; None in older backups.
            is_chief: Whether this process logs accepted changes.

        Returns:
            Whether the data differs.

        Raises:
            UnsupportedError: on all ranks, if the setups differ, and changes are not accepted.
        """
        then = then or {}
        old_rates = then.get("learning_rates", [])
        self._kept_rates = _changed_rates(self.now["learning_rates"], old_rates)
        changes = _changes({key: one for key, one in self.now.items() if key != "learning_rates"}, then, self._ranks)
        if changes and not self._accepts_changes:
            raise _refusal(changes)
        if changes and is_chief:
            _LOG.warning("BackupAndResume accepts these changes since the backup: %s", _joined(changes))
        kinds = [[one.get("class") for one in setup.get("optimizer", ())] for setup in (self.now, then)]
        self.has_same_optimizers = "optimizer" not in changes or kinds[0] == kinds[1]
        self.has_same_counts = not {"metrics", "weighted_metrics", "loss"} & set(changes)
        if is_chief:
            _log_rates(self._model, self._kept_rates, old_rates)
        return "data" in changes

    def rates_to_keep(self) -> list[tuple[Any, Any]]:
        """Returns the optimizers whose learning rate the script has changed, with the new rates."""
        optimizers = [_inner(optimizers_of(self._model)[i]) for i in self._kept_rates]
        plain = [(one, _rate(one)) for one in optimizers]
        return [(one, rate) for one, rate in plain if isinstance(rate, (int, float))]


def set_rates(rates: list[tuple[Any, Any]]) -> None:
    """Sets the learning rates of optimizers."""
    for optimizer, rate in rates:
        optimizer.learning_rate = rate


def learning_rates_of(model: keras.Model) -> list[list[Any]]:
    """Returns the initial steps and learning rate of each optimizer, as plain data."""
    return [[_steps_of(_inner(one)), _rate(_inner(one))] for one in optimizers_of(model)]


def _steps_of(optimizer: Any) -> int:
    steps = optimizer.iterations
    # With gradient accumulation `iterations` is a computed number.
    return int(value_of(steps)) if isinstance(steps, keras.Variable) else int(steps)


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _rate(optimizer: Any) -> Any:
    try:
        return describe(optimizer.get_config().get("learning_rate"))
    except Exception:  # A user's optimizer without a configuration.
        return None


def _changed_rates(now: list[list[Any]], then: list[list[Any]]) -> list[int]:
    """Returns the optimizers whose learning rate in the script differs from the run of the backup.

    An optimizer whose initial steps differ was loaded from a file, and has the rate of that file.
    """
    pairs = enumerate(zip(now, then))
    return [i for i, ((steps, rate), (old_steps, old)) in pairs if steps == old_steps and differences(rate, old)]


def _log_rates(model: keras.Model, which: list[int], then: list[list[Any]]) -> None:
    for i in which:
        optimizer = _inner(optimizers_of(model)[i])
        _LOG.warning(
            "BackupAndResume takes the learning rate of %s from the script: %s. In the run of the backup the script "
            "had %s.", type(optimizer).__name__, _shown(_rate(optimizer)), _shown(then[i][1]),
        )  # fmt: skip


def _shown(rate: Any) -> str:
    return f"{rate:.6g}" if isinstance(rate, (int, float)) else str(rate.get("class", rate))


def _changes(now: dict[str, Any], then: dict[str, Any], ranks: Ranks) -> dict[str, list[str]]:
    """Returns the chief's differences from the run of a backup, by parts such as `optimizer`."""
    found = [(part, text) for part in now if part in then for text in differences(now[part], then[part], part)]
    lines = "\n".join(f"{part}\t{' '.join(text.split())}" for part, text in found)
    if not ranks.is_single:
        lines = ranks.broadcast(lines.encode(), 0).decode()
    changes: dict[str, list[str]] = {}
    for line in lines.splitlines():
        part, _, text = line.partition("\t")
        changes.setdefault(part, []).append(text)
    return changes


def _refusal(changes: dict[str, list[str]]) -> UnsupportedError:
    what = "The model, optimizer, loss, metrics and data must be the same as in the backup."
    if env.text(env.ELASTIC) is not None:
        return UnsupportedError(
            explain(
                what,
                received=_joined(changes),
                do="Give the global batch size, which does not change with the number of workers, and nothing that "
                "depends on `tfdistkit.world_size()`.",
            )
        )
    return UnsupportedError(
        explain(
            what,
            received=_joined(changes),
            do="Use another folder for another training, or accept the changes: BackupAndResume(..., "
            "accept_changes=True).",
        )
    )


def _joined(changes: dict[str, list[str]]) -> str:
    texts = [text for texts in changes.values() for text in texts]
    more = f"; and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    return "; ".join(texts[:_MOST_SHOWN]) + more


def put_last(callback: keras.callbacks.Callback, arguments: dict[str, Any]) -> list[Any]:
    """Moves BackupAndResume behind all other callbacks, including `History`, and returns the others.

    Args:
        callback: The BackupAndResume.
        arguments: Those of `fit`; `callbacks` in it changes.

    Raises:
        UnsupportedError: if there are several, or one of Keras, which sets the epoch, too.
    """
    given: Any = arguments.get("callbacks")
    in_list = isinstance(given, keras.callbacks.CallbackList)
    listed = given.callbacks if in_list else keras.tree.flatten(given)
    if sum(isinstance(one, type(callback)) for one in listed) > 1:
        raise UnsupportedError(
            explain("`callbacks` must have at most one BackupAndResume.", received="several", do="Remove the others.")
        )
    if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in listed):
        raise UnsupportedError(
            explain(
                "`callbacks` must not have keras.callbacks.BackupAndRestore beside BackupAndResume: each would set the "
                "epoch with which training begins.",
                received="both",
                do="Remove keras.callbacks.BackupAndRestore.",
            )
        )
    others = [one for one in listed if one is not callback]
    if not in_list and not any(isinstance(one, keras.callbacks.History) for one in others):
        others.append(keras.callbacks.History())
    if in_list:
        listed[:] = [*others, callback]
    else:
        arguments["callbacks"] = [*others, callback]
    return [one for one in others if not isinstance(one, keras.callbacks.ProgbarLogger)]


def _compiled(model: keras.Model) -> list[Any]:
    """Returns what `compile` sets; losses and metrics are equal only to themselves."""
    return [getattr(model, "optimizer", None), *private_api.compile_arguments(model).values()]
