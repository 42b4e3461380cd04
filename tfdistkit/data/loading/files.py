"""`from_files`: shards data in files, so that each file is read by as few workers as possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdistkit.data.loading.file_shards import Piece
from tfdistkit.data.loading.interleave import Reader, Request, interleave_files
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
    """Creates a dataset of this worker's shard of some files.

    The files are interleaved, one element of each at a time; so a worker that reads every second file gets every
    second element, and the order does not depend on the number of workers. That holds to the last element if the
    lengths of the files differ by at most one, as `tfdistkit data write` writes them.

    Args:
        files: A pattern such as `"data/train-*.tfrecord"`, a list of paths, or a folder written by
            `tfdistkit data write`. The same on every worker.
        reader: `reader(path) -> tf.data.Dataset` of the elements of a file, such as `tf.data.TextLineDataset`; it is
            traced with a scalar string tensor. Default: for a folder of `tfdistkit data write`, the elements as they
            were written; else `tf.data.TFRecordDataset`.
        shuffle: Whether to shuffle: the files, and within each file `buffer_size / files` elements. The order is the
            same for any number of workers, and new in each epoch.
        seed: The seed of the shuffle order, from 0. Default: rank 0 draws one from TensorFlow's global generator.
        buffer_size: Elements in the shuffle buffers of all files together.
        policy: `"file"`: a worker reads only its files. If they do not divide evenly, some workers have more; if the
            elements are counted (`tfdistkit data write`), each worker has a range of elements instead, which may begin
            in the middle of a file, and shuffles it in its own order. `"element"`: every worker reads all files, and
            takes every `num_shards`-th element. `"auto"`: by file if the files divide evenly among the workers, else by
            element. `"seed"`: all elements for every worker, each in its own order. `"off"`: all elements for every
            worker.
        even_steps: `"drop"`, `"pad"`, `"error"`, or None: see `shard`. By file only if the elements are counted.
        num_shards: The number of shards. Default: `tfdistkit.world_size()`.
        index: The shard to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A sharded `tf.data.Dataset` of elements (see `shard`). Map it, and batch it with the global batch size.

    Raises:
        OptionError: (a ValueError) if there are no such files, or an option is invalid.

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
        written = load_index(folder)
        return interleave_files(written.pieces(folder), reader or _reader(parser_of(written, folder)), request)
    return interleave_files([Piece(path) for path in _paths(files)], reader or tf.data.TFRecordDataset, request)


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
                f"`files` must be a pattern that matches files, a list of paths, or a folder with an {INDEX}.",
                received=f"files={files!r}",
                do=_advice(files),
            )
        )
    require_finished(os.path.dirname(path) for path in found)
    return found


def _advice(files: Any) -> str:
    if isinstance(files, (str, os.PathLike)) and (left := leftovers(Path(files))):
        return f"Run `tfdistkit data write` again: it did not finish ({left[0]}), or is still running."
    return "Check that this host sees the files: all workers need the same ones."
