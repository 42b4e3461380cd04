"""`from_tfds`: each element exactly once for any number of workers and files; no download."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.data import from_files, from_tfds
from tfdistkit.data.writing.sources import open_source
from tfdistkit.data.writing.writer import write_shards
from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow

IMAGES = 61


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A data set of images whose first pixel is their number, in 4 files."""
    import tensorflow_datasets as tfds

    class Numbers(tfds.core.GeneratorBasedBuilder):
        """Images and their numbers."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            image, label = tfds.features.Image(shape=(2, 2, 1)), tfds.features.Scalar(dtype=np.int64)
            features = tfds.features.FeaturesDict({"image": image, "label": label})
            return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("image", "label"))

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples(), "test": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for i in range(IMAGES):
                yield i, {"image": tf.fill([2, 2, 1], tf.cast(i, tf.uint8)).numpy(), "label": i}

    made = Numbers(data_dir=str(tmp_path_factory.mktemp("tfds")))
    made.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=4))
    assert [len(split.shard_lengths) for split in made.info.splits.values()] == [4, 4]
    return made


def labels(dataset: tf.data.Dataset) -> list[int]:
    found = []
    for image, label, *_ in dataset.as_numpy_iterator():
        assert (image == label).all()
        found.append(int(label))
    return found


@pytest.mark.parametrize(
    ("workers", "split", "policy"),
    [(4, "train", "auto"), (3, "train[7:40]", "auto"), (7, "train", "file"), (2, "test+train", "file")],
)
def test_each_element_once(builder: Any, workers: int, split: str, policy: str) -> None:
    read = functools.partial(from_tfds, builder, split, as_supervised=True, policy=policy, num_shards=workers)
    whole = labels(builder.as_dataset(split, as_supervised=True))
    assert len(whole) == {"train": IMAGES, "train[7:40]": 33, "test+train": 2 * IMAGES}[split]
    for options in ({}, {"shuffle": True, "seed": 1}):
        parts = [labels(read(index=i, **options)) for i in range(workers)]
        assert sorted(sum(parts, [])) == sorted(whole)
    even = [labels(read(index=i, even_steps="drop")) for i in range(workers)]
    assert len({len(part) for part in even}) == 1
    assert sum(map(len, even)) > len(whole) - 4 * workers and not set(sum(even, [])) - set(whole)


def test_one_order_for_any_number_of_workers(builder: Any) -> None:
    read = functools.partial(from_tfds, builder, as_supervised=True, shuffle=True, seed=9)
    alone = read()
    epochs = [labels(alone), labels(alone)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(IMAGES))
    for workers in (3, 5):
        parts = [read(num_shards=workers, index=i) for i in range(workers)]
        for epoch in epochs:
            taken = [labels(part) for part in parts]
            assert [taken[k % workers][k // workers] for k in range(IMAGES)] == epoch


def test_names_folders_and_missing_data_sets(builder: Any, tmp_path: Path) -> None:
    folder = str(builder.data_path)
    assert sorted(int(e["label"]) for e in from_tfds(folder, "test").as_numpy_iterator()) == list(range(IMAGES))
    with pytest.raises(OptionError, match="must be prepared(.|\n)*tfds build"):
        from_tfds(type(builder)(data_dir=str(tmp_path)))
    with pytest.raises(OptionError, match="split(.|\n)*'test', 'train'"):
        from_tfds(builder, "valid")
    with pytest.raises(OptionError, match="a name that tensorflow-datasets knows"):
        from_tfds("no_such_data_set", data_dir=tmp_path)
    with pytest.raises(OptionError, match="sample_weight"):
        from_tfds(builder, even_steps="pad", num_shards=2, index=0)


def test_other_file_formats_are_errors(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(builder.info), "file_format", "riegeli")
    with pytest.raises(UnsupportedError, match="riegeli(.|\n)*as_dataset"):
        from_tfds(builder)


def test_written_data_sets_load_again(builder: Any, tmp_path: Path) -> None:
    import tensorflow_datasets as tfds

    out = tmp_path / "again"
    index = write_shards(open_source(str(builder.data_path), "train", None), out, 6, lambda line: None)
    assert [file.elements for file in index.files] == [11, 10, 10, 10, 10, 10]
    order = labels(builder.as_dataset("train", as_supervised=True))
    assert [int(element["label"]) for element in from_files(out).as_numpy_iterator()] == order
    assert sorted(int(e["label"]) for e in from_tfds(out).as_numpy_iterator()) == sorted(order)
    stock = tfds.builder_from_directory(str(out)).as_dataset("train")
    assert sorted(int(e["label"]) for e in stock.as_numpy_iterator()) == sorted(order)
