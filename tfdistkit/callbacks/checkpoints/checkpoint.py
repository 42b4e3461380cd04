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

from tfdistkit.callbacks.checkpoints.atomic import whole_file
from tfdistkit.callbacks.checkpoints.checkpoint_files import files_of, is_own, names_each_file, seal
from tfdistkit.callbacks.chief import writes_files
from tfdistkit.errors import OptionError, explain


class ChiefCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model, or its weights, from the chief: one file for the job, whole or not there.

    `keras.callbacks.ModelCheckpoint` lets every rank write the same file. Here every rank decides alike
    (their logs agree), and the chief writes: under a hidden name in the same folder, renamed when the file
    is on the disk. Whoever finds a file under its final name can load it, also with plain Keras, whenever
    the job was killed. In a single process it saves as `ModelCheckpoint` does.

    Every rank must have this callback. The other ranks write nothing, with one exception: if the state to be
    saved has parts on all ranks (variables with `synchronization="on_read"` in a layer), reading it takes
    every rank, and the others save into a temporary folder that is gone afterwards.

    Args:
        filepath: Where to save, on a file system that the chief can write to: ends in `.keras`, or in
            `.weights.h5` with `save_weights_only`. Takes `{epoch}` and the names of the logs, as in
            `"{epoch:02d}-{val_loss:.2f}.keras"`.
        monitor: Name of the log that says what is best.
        verbose: 1 prints a line for each save, on the chief.
        save_best_only: Saves only when `monitor` improves.
        save_weights_only: Saves only the weights.
        mode: `"auto"`, `"min"` or `"max"`: what of `monitor` is better.
        save_freq: `"epoch"`, or a number of batches.
        initial_value_threshold: What `monitor` has to improve on at first.
        keep: How many of the newest files to keep: older ones that this callback wrote by this `filepath` are
            removed, those of earlier runs included; files that anybody else wrote, and copies, stay. Default: all.

    Raises:
        OptionError: (a ValueError) if `filepath` is an address such as `gs://...`, or `keep` is wrong.
        ValueError: from Keras, if another argument is wrong.
        OSError: on the chief, in training, if the file cannot be written. What was there before stays.

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
                    "`filepath` is not in a file system of the chief, where a file can be renamed.",
                    received=f"filepath={self.filepath!r}",
                    expected="a path such as 'checkpoints/model.keras'",
                    do="Save to a local or mounted path, and copy the file afterwards.",
                )
            )
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise OptionError(explain("`keep` is no number of files.", received=f"keep={keep!r}", expected="1 or more"))
        if keep is not None and not names_each_file(self.filepath):
            raise OptionError(
                explain(
                    "`keep` has nothing to choose from: every save has the same name.",
                    received=f"filepath={self.filepath!r}",
                    expected="fields in it, such as {epoch}",
                )
            )
        self.keep = keep
        self._saver: _Saver | None = None

    @property
    def model(self) -> Any:
        """The model; while this callback saves, what saves it."""
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
        """Within it, Keras's own callback decides and names the file, and we save it."""
        chief = writes_files(super().model)
        filepath, verbose = self.filepath, self.verbose
        if not chief:
            # Keras makes the folder of `filepath`, and says what it does: the chief's business.
            self.filepath, self.verbose = os.path.basename(filepath), 0
        self._saver = _Saver(super().model, _write if chief else _take_part)
        try:
            yield
            if chief and self.keep is not None and self._saver.has_saved:
                for path in [one for one in files_of(filepath) if is_own(one)][: -self.keep]:
                    os.remove(path)
        finally:
            self._saver = None
            self.filepath, self.verbose = filepath, verbose


class _Saver:
    """Stands for the model while Keras's callback saves it: `save` and `save_weights` are ours."""

    def __init__(self, model: keras.Model, save_by: Callable[[keras.Model, Callable[..., None], str], None]):
        self._model = model
        self._save_by = save_by
        self.has_saved = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: str, **options: Any) -> None:
        self.has_saved = True
        self._save_by(self._model, lambda path: self._model.save(path, **options), filepath)

    def save_weights(self, filepath: str, **options: Any) -> None:
        self.has_saved = True
        self._save_by(self._model, lambda path: self._model.save_weights(path, **options), filepath)


def _write(model: keras.Model, save: Callable[[str], None], filepath: str) -> None:
    """What the chief does."""
    try:
        with whole_file(filepath) as partial:
            _require_space(partial, _saved_variables(model))
            save(partial)
            seal(partial)
    except IsADirectoryError:
        raise  # Keras has an explanation of its own
    except OSError as error:
        message = explain(
            "ChiefCheckpoint could not write the checkpoint; the file that was there before is unchanged.",
            received=f"{type(error).__name__}: {error}, for filepath={os.path.abspath(filepath)!r}",
            expected="a folder that the chief may write to, with enough free space",
        )
        raise (OSError(message) if error.errno is None else OSError(error.errno, message)) from error


def _require_space(path: str, variables: list[Any]) -> None:
    """Raises an error before HDF5 meets a full disk: it then may end the process without a word (SIGSEGV)."""
    size_bytes = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    free_bytes = shutil.disk_usage(os.path.dirname(path)).free
    if free_bytes < size_bytes:
        raise OSError(errno.ENOSPC, f"{size_bytes} bytes to write, {free_bytes} bytes free")


def _take_part(model: keras.Model, save: Callable[[str], None], filepath: str) -> None:
    """What the other ranks do: nothing, unless the chief cannot read the state without them."""
    if _lives_on_all_ranks(model):
        with tempfile.TemporaryDirectory(prefix="tfdistkit-") as scratch:
            save(os.path.join(scratch, os.path.basename(filepath)))


def _lives_on_all_ranks(model: keras.Model) -> bool:
    """Whether saving `model` reads variables that are the sum or mean of the ranks' parts: a collective.

    Metrics are made of such variables, and Keras does not save metrics. A layer of the user's may hold some
    in its weights, or save its metrics in a `save_own_variables` of its own.
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
    if any(method is not None and not method.__module__.startswith("keras.") for method in methods):
        return True
    return any(map(_saves_by_itself, getattr(layer, "layers", ())))
