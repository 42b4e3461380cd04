"""Data sets of tensorflow-datasets, divided among the workers without loss."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import barrier
from tfdistkit.data.loading.file_shards import TO_THE_END, Piece
from tfdistkit.data.loading.interleave import Reader, Request, read_in_turns
from tfdistkit.data.sharding import BUFFER_SIZE
from tfdistkit.data.writing.dataset_index import tfds_package
from tfdistkit.errors import OptionError, UnsupportedError, explain

# Seconds for a download; the launcher ends those who wait for a rank that died.
_PREPARED_WITHIN_S = 6 * 3600.0


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
    """Makes a dataset of this worker's part of a data set of tensorflow-datasets.

    TensorFlow Datasets itself divides by whole files: workers get unequally many elements, and more workers than files
    are an error. Here every number of workers goes with every number of files, and the parts differ by one element at
    most (where the workers divide the files: by as much as the files).

    Args:
        name_or_builder: A name such as `"mnist"`, a folder of a prepared data set, or a `tfds.core.DatasetBuilder`.
        split: A split, or a part of one: `"train"`, `"train[:80%]"`, `"train+test"`.
        data_dir: Where data sets were prepared. Default: that of tensorflow-datasets.
        as_supervised: Whether elements are (input, target) instead of dicts.
        decoders: As for `tfds.load`.
        download: Whether to prepare the data set if it is not: rank 0 does, then one worker of each host that does not
            see the disk of rank 0, and the others wait. By default nothing is ever fetched.
        shuffle: Whether to shuffle; see `from_files`.
        seed: The order, from 0. Default: rank 0 chooses one.
        buffer_size: Elements that are held in memory to choose from, of all files together.
        policy: `"auto"`, `"file"`, `"element"`, `"seed"` or `"off"`: see `from_files`. The elements are counted.
        even_steps: `"drop"`, `"pad"` (with `as_supervised`), `"error"`, or None: see `shard`.
        num_shards: The number of parts. Default: `tfdistkit.world_size()`.
        index: The part to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A `tf.data.Dataset` of elements, sharded (see `shard`), to be mapped and batched with the global batch size.

    Raises:
        MissingDependencyError: (an ImportError) if tensorflow-datasets is not installed.
        OptionError: (a ValueError) if the data set is not prepared or has no such split, or an option is wrong.
        UnsupportedError: (a RuntimeError) if its files are no TFRecords.

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
    return read_in_turns(pieces, _reader(builder, decoders, as_supervised), request)


def find_builder(name_or_builder: Any, data_dir: Any = None) -> Any:
    """Returns the builder of a data set; nothing is fetched.

    Args:
        name_or_builder: As for `from_tfds`.
        data_dir: As for `from_tfds`.

    Raises:
        OptionError: if there is none.
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
                f"tensorflow-datasets does not know this data set: {str(error).strip().splitlines()[0].rstrip('.')}.",
                received=f"name_or_builder={name_or_builder!r}, data_dir={data_dir!r}",
                expected="a name, a folder of a prepared data set, or a builder",
            )
        ) from error


def pieces_of_split(builder: Any, split: str) -> list[Piece]:
    """Returns the runs of elements, in files, that a split is made of.

    Args:
        builder: The builder.
        split: The split, or a part of one.

    Raises:
        OptionError: if the data set is not prepared, or has no such split.
        UnsupportedError: if its files are no TFRecords.
    """
    if not builder.info.splits:
        raise OptionError(
            explain(
                "The data set is not prepared, and nothing is fetched without being asked for.",
                received=f"{builder.info.full_name}, not in {builder.data_dir}",
                expected="a prepared data set",
                do="Prepare it once with `tfds build`, say `data_dir`, or say `download=True`.",
            )
        )
    file_format = str(getattr(builder.info.file_format, "value", builder.info.file_format))
    if file_format != "tfrecord":
        raise UnsupportedError(
            explain(
                "The data set is stored in files that tf.data does not read.",
                received=f"file_format={file_format!r}",
                expected="'tfrecord'",
                do="Use tfdistkit.data.shard(builder.as_dataset(...)), or prepare it with file_format='tfrecord'.",
            )
        )
    try:
        instructions = builder.info.splits[split].file_instructions
    except (KeyError, ValueError, AssertionError) as error:
        raise OptionError(
            explain(
                f"`split` cannot be read: {str(error).strip().splitlines()[0].rstrip('.')}.",
                received=f"split={split!r}",
                expected=f"one of {sorted(builder.info.splits)}, or a part such as 'train[:80%]'",
            )
        ) from error
    # The end of a run may be told, or that it is the end of the file.
    takes = [i.examples_in_shard - i.skip if i.take == TO_THE_END else i.take for i in instructions]
    return [Piece(os.fspath(i.filename), i.skip, take) for i, take in zip(instructions, takes)]


def _reader(builder: Any, decoders: Any, as_supervised: bool) -> Reader:
    features, keys = builder.info.features, builder.info.supervised_keys
    if as_supervised and not keys:
        raise OptionError(
            explain("The data set names no input and target.", received="as_supervised=True", expected="False")
        )

    def parse(serialized: Any) -> Any:
        example = features.deserialize_example(serialized, decoders=decoders)
        return tf.nest.map_structure(lambda key: example[key], tuple(keys)) if as_supervised else example

    return lambda path: tf.data.TFRecordDataset(path).map(parse)


def _prepared(builder: Any, alone: bool) -> Any:
    """Lets rank 0 prepare the data set, and then one process of each host that does not see the disk of rank 0."""
    cluster = detect_cluster()
    if alone or cluster.world_size == 1 or not cluster.is_training:
        builder.download_and_prepare()
        return builder
    if cluster.rank == 0:
        builder.download_and_prepare()
    barrier(_PREPARED_WITHIN_S)
    if cluster.local_rank == 0:
        builder.download_and_prepare()
    barrier(_PREPARED_WITHIN_S)
    # A builder knows no splits that were made after it.
    return tfds_package().builder_from_directory(str(builder.data_dir))
