"""`tfdistkit data write`: every row is restored, the files are even, and an unfinished folder never gets its name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.data import from_files
from tfdistkit.data.writing.dataset_index import INDEX, load_index
from tfdistkit.data.writing.sources import Source, open_source
from tfdistkit.data.writing.writer import write_shards
from tfdistkit.errors import OptionError

pytestmark = pytest.mark.tensorflow

DEADLINE_S = 120.0


def quietly(line: str) -> None:
    """Ignores progress lines."""


def write(source: str, out: Path, shards: int) -> Any:
    return write_shards(open_source(source, "train", None), out, shards, quietly)


def start(*words: str, cwd: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "tfdistkit", "data", "write", *words]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, stdout=pipe, stderr=pipe)


def records(paths: list[Path]) -> list[bytes]:
    return list(tf.data.TFRecordDataset([str(path) for path in paths]).as_numpy_iterator())


def test_arrays_of_all_kinds_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = ["float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
    arrays = {name: (rng.normal(size=(7, 3)) * 50).astype(name) for name in names}
    arrays |= {"bool": arrays["int8"] > 0, "complex": arrays["float32"] + 1j, "empty": np.zeros([7, 0], "int32")}
    arrays |= {"big": arrays["int32"].astype(">i4"), "one": np.arange(7)}
    arrays["text"] = np.array([["ü", str(i)] for i in range(7)])
    np.savez(tmp_path / "all.npz", **arrays)
    index = write(str(tmp_path / "all.npz"), tmp_path / "out", 3)
    assert [file.elements for file in index.files] == [3, 2, 2]
    rows = list(from_files(tmp_path / "out").as_numpy_iterator())
    for name, array in arrays.items():
        back = np.array([row[name] for row in rows])
        if name == "text":
            assert [[s.decode() for s in row] for row in back] == array.tolist()
        else:
            np.testing.assert_array_equal(back, array, strict=name != "big")


def test_a_single_array_and_records_come_back_in_order(tmp_path: Path) -> None:
    array = np.arange(20.0).reshape(10, 2)
    np.save(tmp_path / "one.npy", array)
    write(str(tmp_path / "one.npy"), tmp_path / "rows", 4)
    np.testing.assert_array_equal(list(from_files(tmp_path / "rows").as_numpy_iterator()), array)
    write(str(tmp_path / "rows"), tmp_path / "again", 3)  # another number of files
    np.testing.assert_array_equal(list(from_files(tmp_path / "again").as_numpy_iterator()), array)
    old = sorted((tmp_path / "rows").glob("*.tfrecord"))
    for source in (tmp_path / "rows" / "*.tfrecord", old[0]):
        out = tmp_path / f"of-{source.stem.strip('*')}"
        write(str(source), out, 2)
        assert list(from_files(out).as_numpy_iterator()) == records(old if "*" in source.name else [source])


def test_invalid_sources_are_errors(tmp_path: Path) -> None:
    np.savez(tmp_path / "uneven.npz", a=np.ones(2), b=np.ones(3))
    np.savez(tmp_path / "objects.npz", a=np.array([{}, None]))
    (tmp_path / "no.npy").write_text("nothing")
    np.save(tmp_path / "few.npy", np.ones(2))
    (tmp_path / "there").mkdir()
    cases = [
        ("uneven.npz", "same number of rows"),
        ("objects.npz", "cannot be read"),
        ("no.npy", "cannot be read"),
        ("missing.npy", "SOURCE must be"),
        ("missing/*.tfrecord", "SOURCE must be"),
    ]
    for name, message in cases:
        with pytest.raises(OptionError, match=message):
            write(str(tmp_path / name), tmp_path / "out", 1)
    with pytest.raises(OptionError, match="at least one element per file"):
        write(str(tmp_path / "few.npy"), tmp_path / "out", 3)
    with pytest.raises(OptionError, match="OUT must not exist"):
        write(str(tmp_path / "few.npy"), tmp_path / "there", 1)
    assert not (tmp_path / "out").exists()


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Any:
        yield b"one"
        raise OSError("the disk is gone")

    for make, message in ((fails, "the disk is gone"), (lambda: iter([b"a", b"b"]), "must hold 3 elements")):
        with pytest.raises(OSError, match=message):
            write_shards(Source("broken", "records", (), 3, make), tmp_path / "out", 1, quietly)
    assert list(tmp_path.iterdir()) == []


def test_corruption_by_the_disk_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(tf.io.TFRecordWriter):
        def write(self, record: bytes) -> None:
            super().write(record.replace(b"7", b"8"))

    source = Source("numbers", "records", (), 10, lambda: iter([str(i).encode() for i in range(10)]))
    monkeypatch.setattr("tensorflow.io.TFRecordWriter", Lossy)
    with pytest.raises(OSError, match="must equal the records read back(.|\n)*data-00001-of-00002"):
        write_shards(source, tmp_path / "out", 2, quietly)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_index_is_an_error(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"format": "of the future"}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(OptionError, match="index of a data set cannot be read"):
            from_files(tmp_path)


def test_a_file_that_lost_elements_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(10))
    index = write(str(tmp_path / "one.npy"), tmp_path / "rows", 2)
    file = tmp_path / "rows" / index.files[1].name
    kept = records([file])[:3]
    with tf.io.TFRecordWriter(str(file)) as writer:
        for record in kept:
            writer.write(record)
    with pytest.raises(tf.errors.FailedPreconditionError, match="expected to contain 10"):
        list(from_files(tmp_path / "rows"))


def test_the_command_writes_and_reports(tmp_path: Path) -> None:
    np.savez(tmp_path / "digits.npz", x=np.ones([50, 8], "float32"), y=np.arange(50))
    job = start("digits.npz", "out", "--shards", "4", cwd=tmp_path)
    printed, errors = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, errors
    assert printed == "out: 50 elements in 4 files of 12 to 13, verified\n"
    assert errors.splitlines()[-1].startswith("verified 50 of 50 elements")
    index = load_index(str(tmp_path / "out"))
    assert (index.elements, index.kind) == (50, "arrays")
    assert json.loads((tmp_path / "out" / INDEX).read_text())["elements"] == 50
    assert [int(row["y"]) for row in from_files(tmp_path / "out").as_numpy_iterator()] == list(range(50))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.npz", "out"]


def test_the_command_ends_with_its_process(tmp_path: Path) -> None:
    np.save(tmp_path / "many.npy", np.zeros([3_000_000, 1], "int8"))
    job = start("many.npy", "out", "--shards", "2", cwd=tmp_path)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not list(tmp_path.glob(".out.*.partial")):
            assert job.poll() is None and time.monotonic() < deadline, job.stderr
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=DEADLINE_S)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 128 + signal.SIGTERM, errors
    assert [path.name for path in tmp_path.iterdir()] == ["many.npy"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required"),
        (["a.npy", "out"], "--shards"),
        (["a.npy", "out", "--shards", "0"], "invalid number of files"),
    ],
)
def test_invalid_arguments_are_errors_at_once(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tfdistkit.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["data", "write", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
