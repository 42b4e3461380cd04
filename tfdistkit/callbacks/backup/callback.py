"""`BackupAndResume`: training that was broken off goes on at the step after the last backup."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.backup_file import write_backup
from tfdistkit.callbacks.backup.callback_states import CallbackStates
from tfdistkit.callbacks.backup.generations import Backup, newest_backup, remove_backups
from tfdistkit.callbacks.backup.model_state import (
    ModelState,
    copy_state,
    put_state,
    require_known_optimizers,
    variables_of,
)
from tfdistkit.callbacks.backup.plain_data import is_plain
from tfdistkit.callbacks.backup.training_setup import SetUp, set_rates
from tfdistkit.callbacks.chief import writes_files
from tfdistkit.callbacks.frequency import frequency_of
from tfdistkit.callbacks.last_signal import LastSignal
from tfdistkit.callbacks.process_group import Ranks, ranks_of
from tfdistkit.callbacks.stock_strategies import require_ours
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.keras_adapter import data_position, private_api
from tfdistkit.keras_adapter.data_position import DataState, FitData
from tfdistkit.report.progress import leave_backup_mark
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.parameter_server.worker_datasets import WorkerDataset

_FILE = "training.backup"
# Seconds between two questions whether a rank got a signal. A question costs 2 ms between processes of one host.
_ASK_EVERY_S = 0.5
_MOST_STEPS_WITHOUT_ASKING = 1000


class BackupAndResume(keras.callbacks.Callback):
    """Lets training go on at the step after its last backup, as if it had never been broken off.

    Give it to `fit`, start the same script again after a crash or a preemption - by hand, by a scheduler, by
    `tfdistkit run --max-restarts` - and `fit` begins where the newest backup was made, also in the middle of an
    epoch, and ends with the weights of a run that nothing happened to: bit for bit with as many replicas, up to
    the rounding of sums with another number of them (and the same global batch size). Under `parameter_server`, where
    no two runs are alike, every element is trained on as often as without the interruption. The backup holds weights,
    layer state and seeds, the optimizers (slots, `iterations`, learning rate), metrics within the epoch, the state
    of the other callbacks (what `EarlyStopping` and `ReduceLROnPlateau` wait for, say; `History`, so that `fit`
    returns that of all epochs), and the place in the data.

    The order of the data is made again and what was seen is left out, so the data must repeat itself: see
    "BackupAndResume" in docs/callbacks.md. The chief writes one file, whole or not at all; ranks without a disk in
    common get it from the rank that has it. Put this anywhere in the list: it always runs last.

    SIGTERM and SIGUSR1 (SLURM's `--signal=USR1@120`) on any rank make one last backup, of all ranks at the same
    step; then every rank ends by that signal, as it would have ended without this callback.

    Args:
        backup_dir: A folder of its own for each training.
        save_freq: A number of steps, `"epoch"`, or a text such as `"500 steps"`, `"2 epochs"`, `"10 minutes"`.
        delete_checkpoint: Whether the backup is removed when `fit` comes to its end; else the next `fit` with this
            folder goes on behind it.
        same_order: Whether data whose order cannot be repeated is an error. False accepts it: the number of steps
            is right then, but elements of the epoch may be seen twice.
        accept_changes: Whether to go on with another optimizer, loss, metric, configuration of a layer, other data or
            another batch size than in the backup, which is an error else. Of other data the epoch begins anew.
        grace_s: Seconds that the last backup may take after a signal; then the process ends without, with exit
            code 128 + the signal's number. None leaves signals alone.

    Raises:
        OptionError: (a ValueError) if an argument is wrong.
        UnsupportedError: (a RuntimeError) when training begins, on all ranks: if the order of the data cannot be
            repeated; if there is a backup, and no generation of it can be read, or it is of another model, optimizer
            or other data; if workers of a parameter-server job read the data themselves.
        OSError: on the chief, in training, if a backup cannot be written. What was there before stays.

    Example:
        ```python
        keras.utils.set_random_seed(7)
        ...
        backup = tfdistkit.callbacks.BackupAndResume("backup", save_freq="10 minutes")
        model.fit(dataset, epochs=90, callbacks=[backup])
        ```
    """

    # What `StopTogether` asks of callbacks after it.
    tfdistkit_stops_all_ranks = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: int | str = "epoch",
        *,
        delete_checkpoint: bool = True,
        same_order: bool = True,
        accept_changes: bool = False,
        grace_s: float | None = 25.0,
    ):
        super().__init__()
        self.backup_dir = os.fspath(backup_dir)
        if not self.backup_dir or "://" in self.backup_dir:
            raise OptionError(
                explain(
                    "`backup_dir` is no folder of a file system.",
                    received=repr(backup_dir),
                    expected="a local or mounted folder",
                )
            )
        if grace_s is not None and (isinstance(grace_s, bool) or not grace_s > 0):
            raise OptionError(explain("`grace_s` is no time.", received=repr(grace_s), expected="seconds, or None"))
        self._frequency = frequency_of("save_freq", save_freq)
        self.save_freq = save_freq
        self.delete_checkpoint, self.same_order, self.grace_s = delete_checkpoint, same_order, grace_s
        self.accept_changes = accept_changes
        self._run: _Run | None = None
        keras_patches.install()

    @contextlib.contextmanager
    def tfdistkit_around_fit(self, model: keras.Model, arguments: dict[str, Any]) -> Iterator[None]:
        """Called by our hook of `fit`, with its arguments, which this may change."""
        _require_supported(model, arguments.get("x"))
        others = _put_last(self, arguments)
        ranks, path = ranks_of(model), os.path.realpath(os.path.join(self.backup_dir, _FILE))
        backup = newest_backup(path, ranks)
        found = backup.content if backup else None
        first = int(arguments.get("initial_epoch") or 0)
        resumed = DataState(**found["data"]) if found else None
        if resumed is not None:
            last = int(arguments.get("epochs") or 1)
            arguments["initial_epoch"] = max(last, resumed.epoch) if found and found["stopped"] else resumed.epoch
        with LastSignal(self.grace_s) as signals:
            run = self._run = _Run(model, ranks, path, signals, others, backup)
            run.setup = SetUp(model, arguments, ranks, self.accept_changes)
            run.data = FitData(
                arguments.get("x"), first, resumed, self.same_order, run.begin_in_epoch, self.accept_changes
            )
            run.data.require_unmoved(arguments.get("validation_data"))
            try:
                with data_position.followed(run.data):
                    yield
            finally:
                self._run = None
                if signals.number:
                    signals.end(signals.number)

    def _running(self) -> _Run:
        if self._run is None:
            # Where it does not work at all, no other line for it would help.
            _require_supported(self.model, None)
            raise UnsupportedError(
                explain(
                    "BackupAndResume is not in the list of callbacks of a `fit`, or was made after Python looked for "
                    "`model.fit`.",
                    received="a call by another callback, by a loop of your own, or by a `fit` that does not know it",
                    expected="model.fit(..., callbacks=[backup]), with `backup` from a line before",
                    do="Make it on a line of its own: backup = tfdistkit.callbacks.BackupAndResume(...). (Where "
                    "tfdistkit.strategy(...) was called before, it may stand in the list.)",
                )
            )
        return self._run

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts back what was saved."""
        self._running().begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts."""
        self._running().epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Makes a backup, if it is time."""
        run = self._running()
        run.count_steps(logs or {})
        due = self._frequency.unit == "steps" and run.steps_since >= self._frequency.amount
        due = run.ask(self._every_s, self._asks, at_once=False) or due
        if due or run.signal:
            run.save(run.data.state_in_epoch(run.epoch))
        run.end_by_signal()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Makes a backup, if it is time."""
        run = self._running()
        run.end_epoch()
        due = self._frequency.unit == "epochs" and run.epochs_since >= self._frequency.amount
        due = run.ask(self._every_s, self._asks, at_once=True) or due
        if due or run.signal or self.model.stop_training:
            run.save(run.data.state_after_epoch(epoch))
        run.end_by_signal()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the backup."""
        run = self._running()
        if self.delete_checkpoint and not run.signal:
            remove_backups(run.path, with_folder=writes_files(self.model))

    @property
    def _every_s(self) -> float | None:
        return self._frequency.amount if self._frequency.unit == "seconds" else None

    @property
    def _asks(self) -> bool:
        return self.grace_s is not None or self._every_s is not None


class _Run:
    """One `fit` with a `BackupAndResume`."""

    data: FitData
    setup: SetUp

    def __init__(
        self, model: Any, ranks: Ranks, path: str, signals: LastSignal, others: list[Any], backup: Backup | None
    ):
        self._model, self._ranks, self.path, self._signals, self._others = model, ranks, path, signals, others
        self._found = backup.content if backup else None
        # A newest file that cannot be read makes way; the one before it stays until there is a new one.
        self._keeps_newest = backup is None or backup.keeps_newest
        self._states: CallbackStates | None = None
        self._logs: dict[str, Any] = {}
        self.signal = 0
        self.epoch = self._batch = self.steps_since = self.epochs_since = 0
        self._saved_at = self._asked_at = time.monotonic()
        self._asked_after = self._ask_after = 1

    def begin(self) -> None:
        """After the others' `on_train_begin`."""
        self._states = CallbackStates(self._others)
        self.setup.see_model()
        self._known: list[Any] | None = variables_of(self._model)
        if self._found is not None:
            if self.setup.is_other_data(self._found.get("setup"), writes_files(self._model)):
                self.data.begin_epoch_anew()
            self._put(self._found, with_counts=False)

    def begin_in_epoch(self) -> None:
        """Before the first step: what happened at the begin of the epoch has happened before."""
        found, self._found = self._found, None
        if found is None or not found["data"]["batch"] or self.data.begins_anew:
            return
        self._batch, self._logs = found["data"]["batch"], found["logs"]
        data_position.keep_logs(self._model, self._logs)
        self._put(found, with_counts=True)

    def _put(self, found: dict[str, Any], with_counts: bool) -> None:
        assert self._states is not None
        rates = self.setup.rates_to_keep()
        with_counts = with_counts and self.setup.has_same_counts
        put_state(self._model, ModelState(**found["model"]), self._ranks, with_counts, self.setup.has_same_optimizers)
        set_rates(rates)
        self._states.put(found["callbacks"])

    def count_steps(self, logs: dict[str, Any]) -> None:
        """Counts the steps of the epoch."""
        if self._known is not None:
            require_known_optimizers(self._model, self._known)
            self._known = None
        self.steps_since += self.data.steps_done - self._batch
        self._batch, self._logs = self.data.steps_done, {key: value for key, value in logs.items() if is_plain(value)}

    def end_epoch(self) -> None:
        """Counts epochs."""
        self.epochs_since, self._batch, self._logs = self.epochs_since + 1, 0, {}
        data_position.keep_logs(self._model, None)

    def ask(self, every_s: float | None, asks: bool, at_once: bool) -> bool:
        """Asks all ranks, now and then, whether one got a signal, and the chief whether it is time.

        Args:
            every_s: Seconds between two backups, if time says when.
            asks: Whether there is anything to ask.
            at_once: Whether to ask now.

        Returns:
            Whether it is time, the same on all ranks.
        """
        self._ask_after -= 1
        if not asks or (self._ask_after > 0 and not at_once):
            return False
        now = time.monotonic()
        due = every_s is not None and now - self._saved_at >= every_s
        # The clocks of the ranks differ, so the chief says after how many steps to ask again.
        steps = max(1, self._asked_after - max(self._ask_after, 0))
        step_s = max(now - self._asked_at, 1e-9) / steps
        after = int(min(max(_ASK_EVERY_S / step_s, 1), _MOST_STEPS_WITHOUT_ASKING))
        row = np.array([self._signals.number, due, 1 if self._ranks.alone else after], np.int64)
        everyone = self._ranks.gather(row) if not self._ranks.alone else row[None]
        self.signal = int(everyone[:, 0].max())
        self._asked_after = self._ask_after = int(everyone[0, 2])
        self._asked_at = time.monotonic()
        return bool(everyone[0, 1])

    def save(self, data: DataState) -> None:
        """Makes a backup; all ranks call it."""
        assert self._states is not None
        strategy: Any = private_api.strategy_of(self._model)
        if private_api.is_ours(strategy):
            strategy.settle_steps()
        is_chief = writes_files(self._model)
        state = copy_state(self._model, self._ranks, with_values=is_chief)
        self.steps_since = self.epochs_since = 0
        self._saved_at = time.monotonic()
        if is_chief:
            content = {
                "data": vars(data), "model": vars(state), "callbacks": self._states.get(), "logs": self._logs,
                "setup": self.setup.now, "stopped": bool(self._model.stop_training and data.batch == 0),
            }  # fmt: skip
            write_backup(self.path, content, self._keeps_newest)
            self._keeps_newest = True

    def end_by_signal(self) -> None:
        """After the last backup: ends this process, when all ranks have come here."""
        if not self.signal:
            return
        with contextlib.suppress(tf.errors.OpError):  # A rank that is gone already has a backup, too.
            self._ranks.any(True)
        leave_backup_mark()
        self._signals.end(self.signal)
        # A handler of the user's own has let the process live: it shall come to an end by itself.
        self._model.stop_training = True


def _put_last(callback: BackupAndResume, arguments: dict[str, Any]) -> list[Any]:
    """Moves a callback behind all others, the history of `fit` included, and returns those."""
    given: Any = arguments.get("callbacks")
    in_list = isinstance(given, keras.callbacks.CallbackList)
    listed = given.callbacks if in_list else keras.tree.flatten(given)
    if sum(isinstance(one, BackupAndResume) for one in listed) > 1:
        raise UnsupportedError(explain("`callbacks` has more than one BackupAndResume.", expected="one for a `fit`"))
    others = [one for one in listed if one is not callback]
    if not in_list and not any(isinstance(one, keras.callbacks.History) for one in others):
        others.append(keras.callbacks.History())
    if in_list:
        listed[:] = [*others, callback]
    else:
        arguments["callbacks"] = [*others, callback]
    return [one for one in others if not isinstance(one, keras.callbacks.ProgbarLogger)]


def _require_supported(model: keras.Model, x: Any) -> None:
    require_ours(
        private_api.strategy_of(model),
        "BackupAndResume",
        "only its own say how far each rank has come in its data, and put a model back on all ranks",
        "keras.callbacks.BackupAndRestore works in a single process, and begins each epoch anew",
    )
    if isinstance(x, WorkerDataset):
        raise UnsupportedError(
            explain(
                "BackupAndResume cannot work here: the workers read the data themselves, and how far each has come is "
                "not known.",
                received="data of strategy.distribute_datasets_from_function(...)",
                expected="data that the coordinator reads: a tf.data.Dataset, arrays, a PyDataset",
                do="Give `fit` the dataset itself; keras.callbacks.BackupAndRestore works, and begins each epoch anew.",
            )
        )
