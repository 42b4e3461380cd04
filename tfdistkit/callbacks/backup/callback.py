"""`BackupAndResume`: resumes interrupted training at the step after the last backup."""

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
from tfdistkit.callbacks.backup.backup_folder import BackupFolder
from tfdistkit.callbacks.backup.found_objects import forget_found, keep_found
from tfdistkit.callbacks.backup.generations import Backup, newest_backup
from tfdistkit.callbacks.backup.model_state import (
    ModelState,
    copy_state,
    put_state,
    require_known_variables,
    variables_of,
)
from tfdistkit.callbacks.backup.of_callbacks.states import CallbackStates
from tfdistkit.callbacks.backup.plain_data import is_plain
from tfdistkit.callbacks.backup.source_files import source_files, warn_of_changes
from tfdistkit.callbacks.backup.training_setup import SetUp, put_last, set_rates
from tfdistkit.callbacks.chief import writes_files
from tfdistkit.callbacks.frequency import frequency_of
from tfdistkit.callbacks.last_signal import LastSignal
from tfdistkit.callbacks.process_group import Ranks, ranks_of
from tfdistkit.callbacks.stock_strategies import require_ours
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.keras_adapter import data_position, private_api
from tfdistkit.keras_adapter.data_position import DataState, FitData
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import Phase
from tfdistkit.report.progress import leave_backup_mark
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.parameter_server.worker_datasets import WorkerDataset
from tfdistkit.validation import require_positive

# Interval between two polls of all ranks for signals. A poll takes 2 ms between processes of one host.
_POLL_EVERY_S = 0.5
_MOST_STEPS_BETWEEN_POLLS = 1000


class BackupAndResume(keras.callbacks.Callback):
    """Resumes training at the step after its last backup, as if it had not been interrupted.

    Pass it to `fit`, and start the same script again after a crash or a preemption - by hand, by a scheduler, by
    `tfdistkit run --max-restarts`. `fit` then begins at the newest backup, also in the middle of an epoch, and ends
    with the weights of an uninterrupted run: bit for bit with the same number of replicas, up to rounding with
    another number (and the same global batch size). Under `parameter_server`, which is not deterministic, every
    element is trained on as often as without the interruption. The backup holds weights, layer state and seeds, the
    optimizers (slots, `iterations`, learning rate), metrics within the epoch, the state of the other callbacks (such
    as the patience of `EarlyStopping`; `History`, so that `fit` returns all epochs), and the position in the data.

    A resumed run repeats the shuffle order and skips the batches that were trained on, so the data must be
    repeatable: see "BackupAndResume" in docs/callbacks.md. The chief writes one file, atomically; ranks that do not
    share its disk get the file over the network. Its position in the list does not matter: it always runs last.

    SIGTERM and SIGUSR1 (SLURM's `--signal=USR1@120`) on any rank trigger a last backup of all ranks at the same
    step; then every rank ends by that signal, as it would without this callback.

    Args:
        backup_dir: A separate folder for each training.
        save_freq: A number of steps, `"epoch"`, or a text such as `"500 steps"`, `"2 epochs"`, `"10 minutes"`.
        delete_checkpoint: Whether to remove the backup at the end of `fit`; if not, the next `fit` with this folder
            continues after it.
        same_order: Whether data without a repeatable order is an error. False accepts it: the number of steps is
            right, but elements of the epoch may be seen twice.
        accept_changes: Whether to continue if the optimizer, loss, metrics, layer configuration, data or batch size
            differ from the backup; if not, a difference is an error. With other data the epoch starts again.
        grace_s: Timeout in seconds for the last backup after a signal; then the process exits without it, with exit
            code 128 + the signal's number. None ignores signals.

    Raises:
        OptionError: (a ValueError) if an argument is invalid.
        UnsupportedError: (a RuntimeError) when training begins, on all ranks: if the order of the data is not
            repeatable; if a backup exists but is unreadable, or its model, optimizer or data differ; if workers of a
            parameter-server job read the data themselves.
        OSError: on the chief, in training, if a backup cannot be written. Existing backups stay.

    Example:
        ```python
        keras.utils.set_random_seed(7)
        ...
        backup = tfdistkit.callbacks.BackupAndResume("backup", save_freq="10 minutes")
        model.fit(dataset, epochs=90, callbacks=[backup])
        ```
    """

    # Lets this callback come after `StopTogether`.
    tfdistkit_stops_all_ranks = True
    # An elastic job needs it in each `fit`.
    tfdistkit_resumes = True

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
                    "`backup_dir` must be a local or mounted folder.",
                    received=f"backup_dir={backup_dir!r}",
                )
            )
        if grace_s is not None:
            require_positive("grace_s", grace_s, "seconds")
        self._frequency = frequency_of("save_freq", save_freq)
        self.save_freq = save_freq
        self.delete_checkpoint, self.same_order, self.grace_s = delete_checkpoint, same_order, grace_s
        self.accept_changes = accept_changes
        self._run: _Run | None = None
        keras_patches.install()

    @contextlib.contextmanager
    def tfdistkit_wrap_fit(self, model: keras.Model, arguments: dict[str, Any]) -> Iterator[None]:
        """Wraps `fit`, and may change its arguments. Called by the hook of `fit`."""
        _require_supported(model, arguments.get("x"))
        others = put_last(self, arguments)
        ranks, folder = ranks_of(model), BackupFolder(self.backup_dir, self.delete_checkpoint)
        setup = SetUp(model, arguments, ranks, self.accept_changes)
        folder.find(setup.identity(), ranks)
        if writes_files(model):
            folder.require_writable()
        folder.require_seen(ranks)
        backup = newest_backup(folder.path, ranks)
        if backup is None and ranks.rank == 0:
            folder.tell_beginning()
        found = backup.content if backup else None
        first = int(arguments.get("initial_epoch") or 0)
        resumed = DataState(**found["data"]) if found else None
        if resumed is not None:
            last = int(arguments.get("epochs") or 1)
            arguments["initial_epoch"] = max(last, resumed.epoch) if found and found["stopped"] else resumed.epoch
        with LastSignal(self.grace_s) as signals:
            run = self._run = _Run(model, ranks, folder, signals, others, backup)
            run.setup = setup
            run.data = FitData(
                arguments.get("x"),
                first,
                resumed,
                self.same_order,
                run.begin_in_epoch,
                self.accept_changes,
                arguments.get("validation_steps"),
            )
            run.data.require_unmoved(arguments.get("validation_data"))
            try:
                with data_position.tracked(run.data):
                    yield
                run.data.leave_random()
                if not run.is_over:
                    folder.end(self.delete_checkpoint, writes_files(model))
            finally:
                self._run = None
                forget_found(model)
                signals.drop_request()
                if signals.number:
                    signals.end(signals.number)

    def _running(self) -> _Run:
        if self._run is None:
            # An unsupported strategy is the first cause: report that one.
            _require_supported(self.model, None)
            raise UnsupportedError(
                explain(
                    "BackupAndResume must be in the list of callbacks of `fit`, and be created before the expression "
                    "`model.fit`.",
                    received="a call by another callback, by your own training loop, or by an unpatched `fit`",
                    expected="model.fit(..., callbacks=[backup])",
                    do="Create it on a line before: backup = tfdistkit.callbacks.BackupAndResume(...). (After "
                    "tfdistkit.strategy(...) it can also be created in the list.)",
                )
            )
        return self._run

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the backup."""
        self._running().begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the epoch."""
        self._running().epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves a backup if one is due."""
        run = self._running()
        if run.is_over:
            return
        run.count_steps(logs or {})
        due = self._frequency.unit == "steps" and run.steps_since >= self._frequency.amount
        due = run.poll(self._every_s, self._polls, now=False) or due
        if due or run.signal:
            run.save(run.data.state_in_epoch(run.epoch))
        run.end_by_signal()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves a backup if one is due."""
        run = self._running()
        if run.is_over:
            return
        run.end_epoch()
        due = self._frequency.unit == "epochs" and run.epochs_since >= self._frequency.amount
        due = run.poll(self._every_s, self._polls, now=True) or due
        if due or run.signal or self.model.stop_training:
            run.save(run.data.state_after_epoch(epoch))
        run.end_by_signal()

    @property
    def _every_s(self) -> float | None:
        return self._frequency.amount if self._frequency.unit == "seconds" else None

    @property
    def _polls(self) -> bool:
        return self.grace_s is not None or self._every_s is not None


class _Run:
    """One `fit` with a `BackupAndResume`."""

    data: FitData
    setup: SetUp

    def __init__(
        self, model: Any, ranks: Ranks, folder: BackupFolder, signals: LastSignal, others: list[Any],
        backup: Backup | None,
    ):  # fmt: skip
        self._model, self._ranks, self._folder, self._signals, self._others = model, ranks, folder, signals, others
        self._found = backup.content if backup else None
        # An unreadable newest file is overwritten; the previous backup stays until a new one is written.
        self._keeps_newest = backup is None or backup.keeps_newest
        self._states: CallbackStates | None = None
        self._logs: dict[str, Any] = {}
        self.signal = 0
        self.is_over = False  # After a signal, whose last backup must stay.
        self.epoch = self._batch = self.steps_since = self.epochs_since = 0
        self._saved_at = self._polled_at = time.monotonic()
        self._poll_interval = self._steps_to_poll = 1

    def begin(self) -> None:
        """Restores the state of the backup, after `on_train_begin` of the other callbacks."""
        keep_found(self._model)
        self._states = CallbackStates(self._others, self._model)
        self.setup.describe_model()
        self._known: list[Any] | None = variables_of(self._model)
        if writes_files(self._model):
            warn_of_changes(self._found.get("sources") if self._found else None)
        if self._found is not None:
            if self.setup.has_other_data(self._found.get("setup"), writes_files(self._model)):
                self.data.begin_epoch_anew()
            self._restore(self._found, with_counts=False)

    def begin_in_epoch(self) -> None:
        """Restores the state of a backup within an epoch, after `on_epoch_begin` and before the first step."""
        found, self._found = self._found, None
        if found is None or not found["data"]["batch"] or self.data.begins_anew:
            return
        self._batch, self._logs = found["data"]["batch"], found["logs"]
        data_position.keep_logs(self._model, self._logs)
        self._restore(found, with_counts=True)

    def _restore(self, found: dict[str, Any], with_counts: bool) -> None:
        assert self._states is not None
        rates = self.setup.rates_to_keep()
        with_counts = with_counts and self.setup.has_same_counts
        put_state(self._model, ModelState(**found["model"]), self._ranks, with_counts, self.setup.has_same_optimizers)
        set_rates(rates)
        self._states.put(found["callbacks"])

    def count_steps(self, logs: dict[str, Any]) -> None:
        """Counts the steps of the epoch."""
        self.setup.require_same_compile()
        if self._known is not None:
            keep_found(self._model)
            require_known_variables(self._model, self._known)
            self._known = None
            if self._states is not None:
                self._states.end_first_step()
        self.steps_since += self.data.steps_done - self._batch
        self._batch, self._logs = self.data.steps_done, {key: value for key, value in logs.items() if is_plain(value)}

    def end_epoch(self) -> None:
        """Counts epochs."""
        self.epochs_since, self._batch, self._logs = self.epochs_since + 1, 0, {}
        data_position.keep_logs(self._model, None)

    def poll(self, every_s: float | None, polls: bool, now: bool) -> bool:
        """Polls all ranks for signals at intervals, and the chief for whether a backup is due.

        Args:
            every_s: Seconds between two backups; None if steps or epochs count.
            polls: Whether polling is needed.
            now: Whether to poll now.

        Returns:
            Whether a backup is due, the same on all ranks.
        """
        self._steps_to_poll -= 1
        if not polls or (self._steps_to_poll > 0 and not now):
            return False
        time_s = time.monotonic()
        due = every_s is not None and time_s - self._saved_at >= every_s
        # The clocks of the ranks differ, so the chief sets the number of steps until the next poll.
        steps = max(1, self._poll_interval - max(self._steps_to_poll, 0))
        step_s = max(time_s - self._polled_at, 1e-9) / steps
        interval = int(min(max(_POLL_EVERY_S / step_s, 1), _MOST_STEPS_BETWEEN_POLLS))
        row = np.array([self._signals.number, due, 1 if self._ranks.is_single else interval], np.int64)
        of_ranks = self._ranks.gather(row) if not self._ranks.is_single else row[None]
        self.signal = int(of_ranks[:, 0].max())
        self._poll_interval = self._steps_to_poll = int(of_ranks[0, 2])
        self._polled_at = time.monotonic()
        return bool(of_ranks[0, 1])

    @notes.noting(Phase.SAVE)
    def save(self, data: DataState) -> None:
        """Saves a backup; all ranks call it."""
        assert self._states is not None
        self.setup.require_same_compile()
        strategy: Any = private_api.strategy_of(self._model)
        if private_api.is_ours(strategy):
            strategy.settle_steps()
        is_chief = writes_files(self._model)
        state = copy_state(self._model, self._ranks, with_values=is_chief)
        self.steps_since = self.epochs_since = 0
        self._saved_at = time.monotonic()
        if is_chief:
            self._states.warn_of_unsaved(in_epoch=data.batch > 0)
            content = {
                "data": vars(data), "model": vars(state), "callbacks": self._states.get(), "logs": self._logs,
                "setup": self.setup.now, "stopped": bool(self._model.stop_training and data.batch == 0),
                "sources": source_files(),
            }  # fmt: skip
            self._folder.own()
            write_backup(self._folder.path, content, self._keeps_newest)
            self._keeps_newest = True

    def end_by_signal(self) -> None:
        """Ends this process by its signal after the last backup, when all ranks have saved."""
        if not self.signal:
            return
        with contextlib.suppress(tf.errors.OpError):  # A peer that has already ended has saved, too.
            self._ranks.any(True)
        leave_backup_mark()
        self._signals.end(self.signal)
        # The user's own handler kept the process alive: let it exit on its own.
        self.is_over = self._model.stop_training = True


def _require_supported(model: keras.Model, x: Any) -> None:
    require_ours(
        private_api.strategy_of(model),
        "BackupAndResume",
        "only tfdistkit's own track each rank's position in its data, and restore a model on all ranks",
        "keras.callbacks.BackupAndRestore works in a single process, and restarts an interrupted epoch",
    )
    if isinstance(x, WorkerDataset):
        raise UnsupportedError(
            explain(
                "BackupAndResume must have data that the coordinator reads: the positions of the workers in their own "
                "data are unknown.",
                received="data of strategy.distribute_datasets_from_function(...)",
                expected="a tf.data.Dataset, arrays, or a PyDataset",
                do="Pass `fit` the dataset itself; or use keras.callbacks.BackupAndRestore, which restarts an "
                "interrupted epoch.",
            )
        )
