"""`from_tfds`: shards data sets of tensorflow-datasets without loss."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import barrier
from tfdistkit.data.loading.file_shards import TO_THE_END, Piece
from tfdistkit.data.loading.interleave import Reader, Request, interleave_files
from tfdistkit.data.sharding import BUFFER_SIZE
from tfdistkit.data.writing.dataset_index import tfds_package
from tfdistkit.errors import OptionError, UnsupportedError, explain

# Timeout of a download, in seconds. If a rank dies, the launcher ends its waiting peers earlier.
_PREPARE_TIMEOUT_S = 6 * 3600.0


def from_tfds(
    name_or_builder: Any,
    split: str = "train",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    as_supervised: bool = False,
    decoders: Any = None,
    download: bool = False,
    shuffle: bool = False,
    seed: int | None = None,
    buffer_size: int = BUFFER_SIZE,
    policy: str = "auto",
    even_steps: str | None = None,
    num_shards: int | None = None,
    index: int | None = None,
) -> tf.data.Dataset:
    """Creates a dataset of this worker's shard of a data set of tensorflow-datasets.

    TensorFlow Datasets shards by whole files: workers get different numbers of elements, and more workers than files
    are an error. Here any number of workers reads any number of files, and the shards differ by at most one element
    (if the files divide evenly among the workers: by the sizes of the files).

    Args:
        name_or_builder: A name such as `"mnist"`, a folder of a prepared data set, or a `tfds.core.DatasetBuilder`.
        split: A split, or a part of one: `"train"`, `"train[:80%]"`, `"train+test"`.
        data_dir: The folder of prepared data sets. Default: tensorflow-datasets' own.
        as_supervised: Whether elements are (input, target) instead of dicts.
        decoders: As for `tfds.load`.
        download: Whether to prepare a data set that is not prepared: rank 0 does, then one worker of each host that
            does not share the disk of rank 0; the others wait. By default nothing is downloaded.
        shuffle: Whether to shuffle; see `from_files`.
        seed: The seed of the shuffle order, from 0. Default: rank 0 chooses one.
        buffer_size: Elements in the shuffle buffers of all files together.
        policy: `"auto"`, `"file"`, `"element"`, `"seed"` or `"off"`: see `from_files`. The element counts are known.
        even_steps: `"drop"`, `"pad"` (with `as_supervised`), `"error"`, or None: see `shard`.
        num_shards: The number of shards. Default: `tfdistkit.world_size()`.
        index: The shard to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A sharded `tf.data.Dataset` of elements (see `shard`). Map it, and batch it with the global batch size.

    Raises:
        MissingDependencyError: (an ImportError) if tensorflow-datasets is not installed.
        OptionError: (a ValueError) if the data set is not prepared or has no such split, or an option is invalid.
        UnsupportedError: (a RuntimeError) if its files are not TFRecords.

    Example:
        ```python
        train = tfdistkit.data.from_tfds("mnist", "train", as_supervised=True, shuffle=True, seed=1)
        model.fit(train.map(prepare).batch(64))
        ```
    """
    builder = find_builder(name_or_builder, data_dir)
    if download:
        builder = _prepared(builder, alone=num_shards is not None)
    pieces = pieces_of_split(builder, split)
    request = Request(shuffle, seed, buffer_size, policy, even_steps, num_shards, index)
    return interleave_files(pieces, _reader(builder, decoders, as_supervised), request)


def find_builder(name_or_builder: Any, data_dir: Any = None) -> Any:
    """Returns the builder of a data set, without a download.

    Args:
        name_or_builder: As for `from_tfds`.
        data_dir: As for `from_tfds`.

    Raises:
        OptionError: if tensorflow-datasets knows no such data set.
    """
    tfds = tfds_package()
    if isinstance(name_or_builder, tfds.core.DatasetBuilder):
        return name_or_builder
    name = os.fspath(name_or_builder) if isinstance(name_or_builder, (str, os.PathLike)) else None
    if name is not None and tf.io.gfile.exists(f"{name.rstrip('/')}/dataset_info.json"):
        return tfds.builder_from_directory(name)
    try:
        return tfds.builder(name_or_builder, data_dir=None if data_dir is None else os.fspath(data_dir))
    except (ValueError, TypeError, tfds.core.DatasetNotFoundError) as error:
        raise OptionError(
            explain(
                "`name_or_builder` must be a name that tensorflow-datasets knows, a folder of a prepared data set, or "
                "a builder.",
                received=f"name_or_builder={name_or_builder!r}, data_dir={data_dir!r}: "
                f"{str(error).strip().splitlines()[0].rstrip('.')}",
            )
        ) from error


def pieces_of_split(builder: Any, split: str) -> list[Piece]:
    """Returns the ranges of elements in files that make up a split.

    Args:
        builder: The builder.
        split: The split, or a part of one.

    Raises:
        OptionError: if the data set is not prepared, or has no such split.
        UnsupportedError: if its files are not TFRecords.
    """
    if not builder.info.splits:
        raise OptionError(
            explain(
                "The data set must be prepared: nothing is downloaded by default.",
                received=f"{builder.info.full_name}, not in {builder.data_dir}",
                do="Prepare it once with `tfds build`, pass `data_dir`, or pass `download=True`.",
            )
        )
    file_format = str(getattr(builder.info.file_format, "value", builder.info.file_format))
    if file_format != "tfrecord":
        raise UnsupportedError(
            explain(
                "The data set must be stored in TFRecord files.",
                received=f"file_format={file_format!r}",
                do="Use tfdistkit.data.shard(builder.as_dataset(...)), or prepare it with file_format='tfrecord'.",
            )
        )
    try:
        instructions = builder.info.splits[split].file_instructions
    except (KeyError, ValueError, AssertionError) as error:
        raise OptionError(
            explain(
                f"`split` must be one of {sorted(builder.info.splits)}, or a part such as 'train[:80%]'.",
                received=f"split={split!r}: {str(error).strip().splitlines()[0].rstrip('.')}",
            )
        ) from error
    # `take` may be the number of elements, or "to the end of the file".
    takes = [i.examples_in_shard - i.skip if i.take == TO_THE_END else i.take for i in instructions]
    return [Piece(os.fspath(i.filename), i.skip, take) for i, take in zip(instructions, takes)]


def _reader(builder: Any, decoders: Any, as_supervised: bool) -> Reader:
    features, keys = builder.info.features, builder.info.supervised_keys
    if as_supervised and not keys:
        raise OptionError(
            explain(
                "`as_supervised` must be False: the data set defines no input and target.",
                received="as_supervised=True",
                do="Leave it out, and map the elements to (x, y).",
            )
        )

    def parse(serialized: Any) -> Any:
        example = features.deserialize_example(serialized, decoders=decoders)
        return tf.nest.map_structure(lambda key: example[key], tuple(keys)) if as_supervised else example

    return lambda path: tf.data.TFRecordDataset(path).map(parse)


def _prepared(builder: Any, alone: bool) -> Any:
    """Prepares the data set on rank 0, then in one process of each host that does not share the disk of rank 0."""
    cluster = detect_cluster()
    if alone or cluster.world_size == 1 or not cluster.is_training:
        builder.download_and_prepare()
        return builder
    if cluster.rank == 0:
        builder.download_and_prepare()
    barrier(_PREPARE_TIMEOUT_S)
    if cluster.local_rank == 0:
        builder.download_and_prepare()
    barrier(_PREPARE_TIMEOUT_S)
    # A builder does not see splits that were written after its creation.
    return tfds_package().builder_from_directory(str(builder.data_dir))
