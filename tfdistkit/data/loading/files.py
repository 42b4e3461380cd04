"""Data sets in files, each read by as few workers as possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdistkit.data.loading.file_shards import Piece
from tfdistkit.data.loading.interleave import Reader, Request, read_in_turns
from tfdistkit.data.sharding import BUFFER_SIZE
from tfdistkit.data.writing.dataset_index import INDEX, load_index, parser_of
from tfdistkit.data.writing.unfinished import leftovers, require_finished
from tfdistkit.errors import OptionError, explain


def from_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    reader: Callable[[Any], tf.data.Dataset] | None = None,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    buffer_size: int = BUFFER_SIZE,
    policy: str = "auto",
    even_steps: str | None = None,
    num_shards: int | None = None,
    index: int | None = None,
) -> tf.data.Dataset:
    """Makes a dataset of this worker's part of some files.

    The files are read in turns, an element of each; so a worker that reads every second file gets every second
    element, and the order does not depend on how many workers there are. That holds to the last element where the
    lengths of the files differ by one at most, as those that `tfdistkit data write` leaves.

    Args:
        files: A pattern such as `"data/train-*.tfrecord"`, a list of paths, or a folder written by
            `tfdistkit data write`. The same on every worker.
        reader: `reader(path) -> tf.data.Dataset` of the elements of a file, such as `tf.data.TextLineDataset`; it is
            traced, with a scalar string tensor. Default: for such a folder, what gives the elements that were written;
            else `tf.data.TFRecordDataset`.
        shuffle: Whether to shuffle: the files, and within each of them `buffer_size / files` elements. The order is the
            same for any number of workers, and another one in each epoch.
        seed: The order, from 0. Default: rank 0 chooses one, by TensorFlow's global generator.
        buffer_size: Elements that are held in memory to choose from, of all files together.
        policy: `"file"`: a worker reads its files only. If the workers do not divide them, some have more; where the
            elements were counted (`tfdistkit data write`), each has a run of elements instead, also in the middle of a
            file, and then shuffles in an order of its own. `"element"`: every worker reads all, and takes every
            `num_shards`-th. `"auto"`: by file if the workers divide the files, else by element. `"seed"`: all of it for
            every worker, in an order of its own. `"off"`: all of it for every worker.
        even_steps: `"drop"`, `"pad"`, `"error"`, or None: see `shard`. By file only where the elements were counted.
        num_shards: The number of parts. Default: `tfdistkit.world_size()`.
        index: The part to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A `tf.data.Dataset` of elements, sharded (see `shard`), to be mapped and batched with the global batch size.

    Raises:
        OptionError: (a ValueError) if there are no such files, or an option is wrong.

    Example:
        ```python
        # tfdistkit data write speech.npz speech --shards 8
        train = tfdistkit.data.from_files("speech", shuffle=True, seed=1)
        model.fit(train.map(prepare).batch(64))
        ```
    """
    request = Request(shuffle, seed, buffer_size, policy, even_steps, num_shards, index)
    folder = os.fspath(files) if isinstance(files, (str, os.PathLike)) else None
    if folder is not None:
        require_finished([folder])
    if folder is not None and tf.io.gfile.exists(f"{folder.rstrip('/')}/{INDEX}"):
        known = load_index(folder)
        return read_in_turns(known.pieces(folder), reader or _reader(parser_of(known, folder)), request)
    return read_in_turns([Piece(path) for path in _paths(files)], reader or tf.data.TFRecordDataset, request)


def _reader(parse: Any) -> Reader:
    if parse is None:
        return tf.data.TFRecordDataset
    return lambda path: tf.data.TFRecordDataset(path).map(parse)


def _paths(files: Any) -> list[str]:
    if isinstance(files, (str, os.PathLike)):
        found = sorted(path for path in tf.io.gfile.glob(os.fspath(files)) if not tf.io.gfile.isdir(path))
    else:
        found = [os.fspath(path) for path in files]
    if not found:
        raise OptionError(
            explain(
                "`files` names no file.",
                received=f"files={files!r}",
                expected=f"a pattern, a list of paths, or a folder with an {INDEX}",
                do=_why_none(files),
            )
        )
    require_finished(os.path.dirname(path) for path in found)
    return found


def _why_none(files: Any) -> str:
    if isinstance(files, (str, os.PathLike)) and (left := leftovers(Path(files))):
        return f"`tfdistkit data write` did not finish it, or is still running: it left {left[0]}. Run it again."
    return "Look whether this host sees the files: all workers need the same ones."
