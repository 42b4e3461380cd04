"""`ChiefCheckpoint`: `keras.callbacks.ModelCheckpoint` for a job of several processes."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.atomic_files import whole_file
from tfdistkit.callbacks.checkpoints.checkpoint_files import files_of, is_own, names_each_file, seal
from tfdistkit.callbacks.chief import writes_files
from tfdistkit.errors import OptionError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import Phase
from tfdistkit.validation import require_integer


class ChiefCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model, or its weights, from the chief: one file per job, written atomically.

    `keras.callbacks.ModelCheckpoint` lets every rank write the same file. Here all ranks decide alike
    (their logs are equal), and the chief writes under a hidden name in the same folder, syncs the file to disk
    and renames it. So a file under its final name is always complete, even if the job is killed, and plain Keras
    can load it. In a single process it saves as `ModelCheckpoint` does.

    Every rank must have this callback. The other ranks write nothing, with one exception: if the saved state is
    spread over all ranks (variables with `synchronization="on_read"` in a layer), reading it is a collective,
    and the other ranks save into a temporary folder that is removed afterwards.

    Args:
        filepath: The file, on a file system that the chief can write to: ends in `.keras`, or in `.weights.h5`
            with `save_weights_only`. May contain `{epoch}` and the names of logs, as in
            `"{epoch:02d}-{val_loss:.2f}.keras"`.
        monitor: Name of the log that decides which model is best.
        verbose: 1 prints a line for each save, on the chief.
        save_best_only: Saves only when `monitor` improves.
        save_weights_only: Saves only the weights.
        mode: `"auto"`, `"min"` or `"max"`: the direction in which `monitor` improves.
        save_freq: `"epoch"`, or a number of batches.
        initial_value_threshold: The value of `monitor` that the first save must improve on.
        keep: Number of newest files to keep: older files that this callback wrote under this `filepath` are
            removed, also files of earlier runs; files of other writers, and copies, stay. Default: all.

    Raises:
        OptionError: (a ValueError) if `filepath` is a URL such as `gs://...`, or `keep` is invalid.
        ValueError: from Keras, if another argument is invalid.
        OSError: on the chief, in training, if the file cannot be written. The previous file stays.

    Example:
        ```python
        model.fit(dataset, epochs=3, callbacks=[tfdistkit.callbacks.ChiefCheckpoint("model.keras")])
        ```
    """

    filepath: str
    verbose: int

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        keep: int | None = None,
    ):
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=save_best_only,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )
        if "://" in self.filepath:
            raise OptionError(
                explain(
                    "`filepath` must be a path in a file system of the chief, such as 'checkpoints/model.keras'.",
                    received=f"filepath={self.filepath!r}",
                    do="Save to a local or mounted path, and copy the file afterwards.",
                )
            )
        self.keep = None if keep is None else require_integer("keep", keep)
        if keep is not None and not names_each_file(self.filepath):
            raise OptionError(
                explain(
                    "`filepath` must have a field such as {epoch} with `keep`: now every save has the same name.",
                    received=f"filepath={self.filepath!r}, keep={keep}",
                    do="Write it into the name: '{epoch:02d}.keras'.",
                )
            )
        self._saver: _Saver | None = None

    @property
    def model(self) -> Any:
        """The model; while this callback saves, a proxy with its own `save` methods."""
        return self._saver or super().model

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves every `save_freq` batches."""
        if self.save_freq != "epoch":
            with self._saving():
                super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves after the epoch, with `save_freq="epoch"`."""
        with self._saving():
            super().on_epoch_end(epoch, logs)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Replaces the model by a proxy: Keras's callback decides when to save and names the file, this saves it."""
        chief = writes_files(super().model)
        filepath, verbose = self.filepath, self.verbose
        if not chief:
            # Keras creates the folder of `filepath` and prints messages: only the chief may.
            self.filepath, self.verbose = os.path.basename(filepath), 0
        self._saver = _Saver(super().model, _write if chief else _join_collectives)
        try:
            yield
            if chief and self.keep is not None and self._saver.has_saved:
                for path in [one for one in files_of(filepath) if is_own(one)][: -self.keep]:
                    os.remove(path)
        finally:
            self._saver = None
            self.filepath, self.verbose = filepath, verbose


class _Saver:
    """Proxy of the model whose `save` and `save_weights` write atomically on the chief."""

    def __init__(self, model: keras.Model, save_by: Callable[[keras.Model, Callable[..., None], str], None]):
        self._model = model
        self._save_by = save_by
        self.has_saved = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: str, **options: Any) -> None:
        self._save(lambda path: self._model.save(path, **options), filepath)

    def save_weights(self, filepath: str, **options: Any) -> None:
        self._save(lambda path: self._model.save_weights(path, **options), filepath)

    def _save(self, save: Callable[[str], None], filepath: str) -> None:
        with notes.noting(Phase.SAVE):
            self._settle()
            self._save_by(self._model, save, filepath)

    def _settle(self) -> None:
        """Lets an algorithm that trains on each rank alone average the weights; all ranks come here."""
        self.has_saved = True
        strategy: Any = private_api.strategy_of(self._model)
        if private_api.is_ours(strategy):
            strategy.settle_weights()


def _write(model: keras.Model, save: Callable[[str], None], filepath: str) -> None:
    """Saves on the chief."""
    try:
        with whole_file(filepath) as partial:
            _require_space(partial, _saved_variables(model))
            save(partial)
            seal(partial)
    except IsADirectoryError:
        raise  # Keras explains this one
    except OSError as error:
        message = explain(
            "ChiefCheckpoint could not write the checkpoint; the previous file is unchanged.",
            received=f"{type(error).__name__}: {error}, for filepath={os.path.abspath(filepath)!r}",
            expected="a folder that the chief may write to, with enough free space",
        )
        raise (OSError(message) if error.errno is None else OSError(error.errno, message)) from error


def _require_space(path: str, variables: list[Any]) -> None:
    """Raises an error if the disk is too full: HDF5 can crash the process (SIGSEGV) when writing fails."""
    size_bytes = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    free_bytes = shutil.disk_usage(os.path.dirname(path)).free
    if free_bytes < size_bytes:
        raise OSError(errno.ENOSPC, f"{size_bytes} bytes to write, {free_bytes} bytes free")


def _join_collectives(model: keras.Model, save: Callable[[str], None], filepath: str) -> None:
    """Saves on the other ranks, into a temporary folder, if reading the state is a collective."""
    if _lives_on_all_ranks(model):
        with tempfile.TemporaryDirectory(prefix="tfdistkit-") as scratch:
            save(os.path.join(scratch, os.path.basename(filepath)))


def _lives_on_all_ranks(model: keras.Model) -> bool:
    """Returns whether saving `model` reads on-read variables (sum or mean over the ranks), which is a collective.

    Metrics consist of such variables, but Keras does not save metrics. A user's layer may have some in its
    weights, or save its metrics in its own `save_own_variables`.
    """
    if any(map(_is_on_read, _saved_variables(model))):
        return True
    return any(map(_is_on_read, model.variables)) and _saves_by_itself(model)


def _saved_variables(model: keras.Model) -> list[Any]:
    return [*model.weights, *(model.optimizer.variables if model.optimizer else [])]


def _is_on_read(variable: keras.Variable) -> bool:
    return getattr(variable.value, "synchronization", None) == tf.VariableSynchronization.ON_READ


def _saves_by_itself(layer: keras.layers.Layer) -> bool:
    methods = (getattr(type(layer), name, None) for name in ("save_own_variables", "save_assets"))
    if any(method is not None and not private_api.is_of_keras(method) for method in methods):
        return True
    return any(map(_saves_by_itself, getattr(layer, "layers", ())))
