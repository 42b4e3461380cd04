"""What a script sets a training up with (model, optimizer, loss, metrics, data), and what a backup differs in."""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfdistkit.callbacks.backup.description import describe, differences
from tfdistkit.callbacks.backup.model_state import optimizers_of, value_of
from tfdistkit.callbacks.backup.training_description import setup_of_data, setup_of_model
from tfdistkit.callbacks.process_group import Ranks
from tfdistkit.errors import UnsupportedError, explain

_LOG = logging.getLogger(__name__)

_MOST_TOLD = 8


class SetUp:
    """What a training is set up with, and what of it differs from the run of a backup.

    Args:
        model: The model, as the script gives it to `fit`.
        arguments: The arguments of `fit`.
        ranks: The ranks.
        accept_changes: Whether differences are no error.
    """

    def __init__(self, model: keras.Model, arguments: dict[str, Any], ranks: Ranks, accept_changes: bool):
        self._model, self._ranks, self._accepts_changes = model, ranks, accept_changes
        self._kept_rates: list[int] = []
        self.has_same_optimizers = self.has_same_counts = True
        self.now: dict[str, Any] = {
            "data": setup_of_data(arguments, ranks.size), "learning_rates": learning_rates_of(model),
        }  # fmt: skip

    def see_model(self) -> None:
        """Describes the model, when it has been built."""
        self.now.update(setup_of_model(self._model))

    def is_other_data(self, then: dict[str, Any] | None, is_chief: bool) -> bool:
        """Compares this with the run of a backup; all ranks call it.

        Args:
            then: What `now` was in that run; None in backups that do not say.
            is_chief: Whether this process says what is accepted.

        Returns:
            Whether the data is other data.

        Raises:
            UnsupportedError: on all ranks, if something differs, and changes are not accepted.
        """
        then = then or {}
        old_rates = then.get("learning_rates", [])
        self._kept_rates = _changed_rates(self.now["learning_rates"], old_rates)
        told = _changes({key: one for key, one in self.now.items() if key != "learning_rates"}, then, self._ranks)
        if told and not self._accepts_changes:
            raise _refusal(told)
        if told and is_chief:
            _LOG.warning("BackupAndResume goes on with what has changed since the backup: %s", _in_words(told))
        kinds = [[one.get("class") for one in setup.get("optimizer", ())] for setup in (self.now, then)]
        self.has_same_optimizers = "optimizer" not in told or kinds[0] == kinds[1]
        self.has_same_counts = not {"metrics", "weighted_metrics", "loss"} & set(told)
        if is_chief:
            _tell_rates(self._model, self._kept_rates, old_rates)
        return "data" in told

    def rates_to_keep(self) -> list[tuple[Any, Any]]:
        """Returns the optimizers whose learning rate the script has changed, and what it is."""
        optimizers = [_inner(optimizers_of(self._model)[i]) for i in self._kept_rates]
        plain = [(one, _rate(one)) for one in optimizers]
        return [(one, rate) for one, rate in plain if isinstance(rate, (int, float))]


def set_rates(rates: list[tuple[Any, Any]]) -> None:
    """Gives optimizers their learning rates."""
    for optimizer, rate in rates:
        optimizer.learning_rate = rate


def learning_rates_of(model: keras.Model) -> list[list[Any]]:
    """Returns of each optimizer after how many steps it begins, and with which learning rate: plain data."""
    return [[_steps_of(_inner(one)), _rate(_inner(one))] for one in optimizers_of(model)]


def _steps_of(optimizer: Any) -> int:
    steps = optimizer.iterations
    # With gradient accumulation it is computed.
    return int(value_of(steps)) if isinstance(steps, keras.Variable) else int(steps)


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _rate(optimizer: Any) -> Any:
    try:
        return describe(optimizer.get_config().get("learning_rate"))
    except Exception:  # An optimizer of the user's that has no configuration.
        return None


def _changed_rates(now: list[list[Any]], then: list[list[Any]]) -> list[int]:
    """Which optimizers have another learning rate than the script gave them in the run of the backup.

    One that begins after another number of steps was loaded from a file, and has the rate that training came to.
    """
    pairs = enumerate(zip(now, then))
    return [i for i, ((steps, rate), (old_steps, old)) in pairs if steps == old_steps and differences(rate, old)]


def _tell_rates(model: keras.Model, which: list[int], then: list[list[Any]]) -> None:
    for i in which:
        optimizer = _inner(optimizers_of(model)[i])
        _LOG.warning(
            "BackupAndResume takes the learning rate of %s from the script: %s. In the run of the backup the script "
            "said %s.", type(optimizer).__name__, _told(_rate(optimizer)), _told(then[i][1]),
        )  # fmt: skip


def _told(rate: Any) -> str:
    return f"{rate:.6g}" if isinstance(rate, (int, float)) else str(rate.get("class", rate))


def _changes(now: dict[str, Any], then: dict[str, Any], ranks: Ranks) -> dict[str, list[str]]:
    """Returns what differs from the run of a backup, by parts such as `optimizer`, as the chief sees it."""
    found = [(part, text) for part in now if part in then for text in differences(now[part], then[part], part)]
    lines = "\n".join(f"{part}\t{' '.join(text.split())}" for part, text in found)
    if not ranks.alone:
        lines = ranks.share(lines.encode(), 0).decode()
    told: dict[str, list[str]] = {}
    for line in lines.splitlines():
        part, _, text = line.partition("\t")
        told.setdefault(part, []).append(text)
    return told


def _refusal(told: dict[str, list[str]]) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "The backup is of a training that was set up in another way.",
            received=_in_words(told),
            expected="the same model, optimizer, loss, metrics and data",
            do="Take another folder for another training. BackupAndResume(..., accept_changes=True) goes on with what "
            "has changed.",
        )
    )


def _in_words(told: dict[str, list[str]]) -> str:
    texts = [text for texts in told.values() for text in texts]
    more = f"; and {len(texts) - _MOST_TOLD} more" if len(texts) > _MOST_TOLD else ""
    return "; ".join(texts[:_MOST_TOLD]) + more
