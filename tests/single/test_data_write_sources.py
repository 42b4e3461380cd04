"""`tfdistkit data write`: errors for damaged sources; CSV, patterns, killed runs."""

from __future__ import annotations

import os
import pickle
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
from tfdistkit.data.writing.csv_files import CsvOptions
from tfdistkit.data.writing.dataset_index import load_index
from tfdistkit.data.writing.sources import open_source
from tfdistkit.data.writing.unfinished import MARKER, leftovers, unfinished_folder
from tfdistkit.data.writing.writer import write_shards
from tfdistkit.errors import OptionError

pytestmark = pytest.mark.tensorflow

DEADLINE_S = 120.0
RECORDS = [b"record %d" % i for i in range(10)]
FRAMED = len(RECORDS[0]) + 16


def write(source: str | Path, out: Path, shards: int = 1, label: str | None = None, **csv: Any) -> list[str]:
    """Writes, and returns the reported lines without progress."""
    lines: list[str] = []
    write_shards(open_source(str(source), "train", None, CsvOptions(**csv), label), out, shards, lines.append)
    return [line for line in lines if " elements, " not in line]


def elements(folder: Path) -> list[Any]:
    return list(from_files(folder).as_numpy_iterator())


def record_file(path: Path, records: list[bytes]) -> bytes:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path.read_bytes()


def test_damaged_arrays_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", a=np.arange(1000.0), b=np.arange(1000))
    good = (tmp_path / "good.npz").read_bytes()
    flipped = bytearray(good)
    flipped[len(good) * 3 // 4] ^= 255
    np.save(tmp_path / "good.npy", np.arange(100.0))
    np.savez(tmp_path / "objects.npz", fine=np.ones(1), odd=np.array([{}], object))
    np.savez(tmp_path / "uneven.npz", a=np.ones(2), b=np.ones(3), c=1)
    np.savez(tmp_path / "dates.npz", a=np.array(["2020-01-01"], "M8[D]"))
    np.savez(tmp_path / "none.npz")
    (tmp_path / "folder.npz").mkdir()
    cases = {
        "cut.npz": (good[: len(good) // 2], "cut off"),
        "flipped.npz": (bytes(flipped), "array 'b': Bad CRC-32"),
        "text.npz": (b"hello", "it is neither .npy nor .npz"),
        "empty.npy": (b"", "it is empty"),
        "pickled.npy": (pickle.dumps([1]), "it is a pickle"),
        "cut.npy": ((tmp_path / "good.npy").read_bytes()[:400], "greater than file size"),
        "objects.npz": (None, "array 'odd': it holds Python objects"),
        "uneven.npz": (None, "a: 2, b: 3, c: a scalar"),
        "dates.npz": (None, "a dtype that TensorFlow has"),
        "none.npz": (None, "no arrays"),
        "folder.npz": (None, "The folder must hold files"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(OptionError, match=message) as error:
            write(tmp_path / name, tmp_path / "out")
        assert str(tmp_path / name) in str(error.value), name
    assert not (tmp_path / "out").exists() and not leftovers(tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-3], "record 9 .*truncated"),
        (lambda b: b[: -FRAMED + 5], "record 9 .*cut off after 5 of its bytes"),  # for TensorFlow the file just ends
        (lambda b: b[: FRAMED * 2 + 14] + b"!" + b[FRAMED * 2 + 15 :], "record 2 .*corrupted"),
        (lambda b: b"a,b\n1,2\n", "record 0 .*cut off after 8"),
        (lambda b: b"\x1f\x8b\x08" + b, "record 0 (.|\n)*gunzip"),
    ],
)
def test_damaged_records_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    record_file(tmp_path / "1.tfrecord", RECORDS)
    content = record_file(tmp_path / "2.tfrecord", RECORDS)
    (tmp_path / "2.tfrecord").write_bytes(damage(content))
    with pytest.raises(OSError, match=message) as error:
        write(tmp_path / "*.tfrecord", tmp_path / "out")
    assert "2.tfrecord" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.tfrecord", "2.tfrecord"]


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    write(tmp_path / "a.npy", tmp_path / "rows", 2)
    file = tmp_path / "rows" / "data-00001-of-00002.tfrecord"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 4 // 5])  # four of five records
    with pytest.raises(OptionError, match="must match the index (.|\n)*data-00001-of-00002"):
        write(tmp_path / "rows", tmp_path / "out")
    file.unlink()
    with pytest.raises(OptionError, match="data-00001-of-00002.tfrecord: missing"):
        write(tmp_path / "rows", tmp_path / "out")


def test_csv_comes_back_with_its_types(tmp_path: Path) -> None:
    text = '\ufeffid,price , name,zip\r\n1, 2.5,"a, ""b""\nc",01234\r\n\r\n-2,nan,,10000\r\n3,1e3,ü,?\r\n'
    (tmp_path / "shop.csv").write_bytes(text.encode())
    notes = write(tmp_path / "shop.csv", tmp_path / "out", 2, label="price")
    assert notes == [f"{tmp_path}/shop.csv: 'zip' is read as strings: line 3 has '01234', 1 other cells are numbers"]
    index = load_index(str(tmp_path / "out"))
    assert [column[:2] for column in index.columns] == [
        ("id", "int64"),
        ("price", "float64"),
        ("name", "string"),
        ("zip", "string"),
    ]
    features, labels = zip(*elements(tmp_path / "out"))
    np.testing.assert_array_equal(labels, [2.5, np.nan, 1000.0])
    assert [int(row["id"]) for row in features] == [1, -2, 3]
    assert [row["name"].decode() for row in features] == ['a, "b"\nc', "", "ü"]
    assert [row["zip"] for row in features] == [b"01234", b"10000", b"?"]
    write(tmp_path / "out", tmp_path / "again", 3)  # the label stays one
    assert [label for _, label in elements(tmp_path / "again")][::2] == [2.5, 1000.0]


def test_csv_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text("1;2.5;a\n3;4;b\n")
    write(tmp_path / "plain.csv", tmp_path / "out", header=False, delimiter=";")
    assert elements(tmp_path / "out") == [
        {"column0": 1, "column1": 2.5, "column2": b"a"},
        {"column0": 3, "column1": 4.0, "column2": b"b"},
    ]
    (tmp_path / "words.tsv").write_text("text\tlabel\nbad, really\tneg\n")
    write(tmp_path / "words.tsv", tmp_path / "words", header=True)
    assert elements(tmp_path / "words") == [{"text": b"bad, really", "label": b"neg"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2\n3,4\n", "first row may be column names or data"),
        ("2019,2020\n3,4\n", "first row may be column names or data"),
        ("NA,2\n3,4\n", "first row may be column names or data"),
        ("good,pos\nbad,neg\n", "first row may be column names or data"),
        ("a,b\n", "first row may be column names or data"),
        (",a\n0,2\n", r"column 0 .* no name(.|\n)*index=False"),
        ("a;b\n1;2\n", "--delimiter ';'"),
        ("a,b\n1,2\n3\n", "line 3 has 1 cells"),
        ('a,b\n1,"x\n2,y\n', "line 3: unexpected end"),
        ("a,b\n1,2\n,3\n", "line 3: a cell of 'a' is empty"),
        ("a,a\n1,2\n", "the same name: a"),
        ("", "it is empty"),
        ("a,b\n1,ü\n".encode("latin1"), "not UTF-8"),
    ],
)
def test_ambiguous_csv_is_an_error(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OptionError, match=message) as error:
        write(tmp_path / "a.csv", tmp_path / "out")
    assert f"{tmp_path}/a.csv" in str(error.value)


def test_invalid_labels_are_errors(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=np.ones(2), digit=np.ones(2))
    np.save(tmp_path / "a.npy", np.ones(2))
    with pytest.raises(OptionError, match="Did you mean 'digit'"):
        write(tmp_path / "a.npz", tmp_path / "out", label="digits")
    with pytest.raises(OptionError, match="must name one of at least two columns"):
        write(tmp_path / "a.npy", tmp_path / "out", label="y")


def test_patterns_join_files_of_one_schema(tmp_path: Path) -> None:
    for i in range(2):
        np.savez(tmp_path / f"part{i}.npz", x=np.arange(3) + 10 * i)
        write(tmp_path / f"part{i}.npz", tmp_path / f"rows{i}", 2)
        (tmp_path / f"old{i}").mkdir()
        record_file(tmp_path / f"old{i}" / "a.tfrecord", [b"%d" % i])
    record_file(tmp_path / "old2.tfrecord", [b"2"])
    for number, pattern in enumerate(["part?.npz", "rows?", "[pr]*[01]*"]):  # files, folders, both
        out = tmp_path / f"joined{number}"
        write(tmp_path / pattern, out, 3)
        assert load_index(str(out)).kind == "arrays"
        assert [int(row["x"]) for row in elements(out)] == [0, 1, 2, 10, 11, 12] * (2 if number == 2 else 1)
    write(tmp_path / "old*", tmp_path / "out")  # folders and a file
    assert elements(tmp_path / "out") == [b"0", b"1", b"2"]
    np.savez(tmp_path / "part2.npz", x=np.arange(3.0))
    (tmp_path / "empty").mkdir()
    cases = [
        ("part?.npz", "same names.*int64.*float64"),
        ("[op]*", "same names.*TFRecords"),
        ("empty", "must hold files"),
        ("nothing*", "SOURCE must be"),
        ("e*", "must hold files"),
    ]
    for pattern, message in cases:
        with pytest.raises(OptionError, match=message):
            write(tmp_path / pattern, tmp_path / "new")


def test_the_order_of_columns_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,x\n")
    (tmp_path / "2.csv").write_text("b,a\ny,2\n")
    write(tmp_path / "*.csv", tmp_path / "out")
    assert elements(tmp_path / "out") == [{"a": 1, "b": b"x"}, {"a": 2, "b": b"y"}]


def test_the_next_run_reports_and_removes_a_killed_one(tmp_path: Path) -> None:
    np.save(tmp_path / "many.npy", np.zeros([3_000_000, 1], "int8"))
    np.save(tmp_path / "few.npy", np.arange(4))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tfdistkit", "data", "write", "many.npy", "out", "--shards", "2"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    job = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not any(tmp_path.glob(".out.*.partial/*.tfrecord")):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(OptionError, match="OUT must not be in use by another process"):
            write(tmp_path / "few.npy", out)
        job.send_signal(signal.SIGKILL)
        job.wait(DEADLINE_S)
    finally:
        job.kill()
        job.wait()
    (left,) = leftovers(out)
    for read in (
        lambda: from_files(left),
        lambda: from_files(f"{left}/*.tfrecord"),
        lambda: open_source(str(left), "train", None),
    ):
        with pytest.raises(OptionError, match="must have finished the folder"):
            read()
    with pytest.raises(OptionError, match="`tfdistkit data write` again: it did not finish"):
        from_files(out)
    (note,) = write(tmp_path / "few.npy", out)
    assert note == f"removed {left}, left by an earlier run that was killed"
    assert elements(out) == [0, 1, 2, 3] and not (out / MARKER).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.npy", "many.npy", "out"]


def test_other_folders_are_not_removed(tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.arange(4))
    (tmp_path / ".out.mine.partial").mkdir()
    unmarked = tmp_path / ".out.abcdefgh.partial"
    unmarked.mkdir()
    with unfinished_folder(tmp_path / "out.b") as other:
        assert [line.split(",")[0] for line in write(tmp_path / "few.npy", tmp_path / "out")] == [
            f"cannot remove {unmarked}"
        ]
        assert (other / MARKER).exists()
    assert (tmp_path / ".out.mine.partial").exists() and unmarked.exists()


def test_the_command_takes_the_options_of_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tfdistkit.cli import data
    from tfdistkit.data.writing import command as write_command

    class Replaced(Exception):
        """Replaces the process that writes."""

    def execve(program: str, words: list[str], environment: dict[str, str]) -> None:
        monkeypatch.setattr(sys, "argv", words[2:])
        raise Replaced

    (tmp_path / "a.csv").write_text("1\t2\n3\t4\n")
    words = ["write", f"{tmp_path}/a.csv", f"{tmp_path}/out", "--shards", "1", "--delimiter", "\\t"]
    monkeypatch.setattr(data.os, "execve", execve)
    monkeypatch.setattr(write_command.signal, "signal", lambda *_: None)
    for more, code in (([], 2), (["--header", "no", "--label", "column1"], 0)):
        with pytest.raises(Replaced):
            data.main([*words, *more])
        assert write_command.main() == code
    assert "--header no" in capsys.readouterr().err
    assert elements(tmp_path / "out") == [({"column0": 1}, 2), ({"column0": 3}, 4)]
