"""`tfdistkit data`: write data sets as evenly sharded TFRecords."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tfdistkit import env

_DESCRIPTION = """\
Writes a data set as TFRecords in files that differ by one element at most, reads them again and compares counts and
checksums. OUT appears in one step, when all of it is right; tfdistkit.data.from_files(OUT) reads it."""

_EPILOG = """\
SOURCE is one of
  digits.npz, digits.npy     arrays: an element is a row, a dict of what was saved by name
  wine.csv, wine.tsv         CSV: an element is a row, a dict of int64, float64 and strings by name
  'old/*.tfrecord', a folder TFRecords: an element is a record
  mnist, tfds:mnist, folder  a prepared data set of tensorflow-datasets (pip install 'tensorflow-datasets>=4.9'
                             importlib_resources); nothing is downloaded; OUT is such a folder too
or a pattern ('part-*.csv') of files and folders that hold the same columns.

examples:
  tfdistkit data write digits.npz digits --shards 8
  tfdistkit data write wine.csv wine --label quality --shards 8
  tfdistkit data write mnist mnist-train --split train --shards 8

exit codes:
  0 written and verified; 1 it failed, and OUT is not there; 2 wrong usage, or SOURCE is not what it should be"""

_USAGE_EXIT_CODE = 2
# Options that the process that writes takes as they are.
_TOLD = ("source", "out", "shards", "split", "data_dir", "label", "delimiter")
# The module of the training wing that this process becomes, which loads TensorFlow.
_WRITER = "tfdistkit.data.writing.command"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_EXIT_CODE, f"{self.prog}: {message}\nSee `tfdistkit data write --help`.\n")


def main(arguments: Sequence[str]) -> int:
    """Runs the command: this process becomes the one that writes.

    Args:
        arguments: What follows `tfdistkit data`.

    Returns:
        The exit code, see `tfdistkit data write --help`.
    """
    options = make_parser().parse_args(list(arguments))
    told = {name: getattr(options, name) for name in _TOLD}
    told["header"] = None if options.header is None else options.header == "yes"
    # Writing wants no GPU, and nothing of what TensorFlow says when it starts.
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": env.text("TF_CPP_MIN_LOG_LEVEL") or "3"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", _WRITER, json.dumps(told)], env.child_env(quiet))


def make_parser() -> _Parser:
    """Makes the parser of the command."""
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="tfdistkit data", description=_DESCRIPTION, formatter_class=form, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="write")
    write = actions.add_parser(
        "write",
        help="write a data set as TFRecords",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=form,
        allow_abbrev=False,
    )
    write.add_argument("source", metavar="SOURCE", help="what to write, see below")
    write.add_argument("out", metavar="OUT", help="the folder to make")
    write.add_argument(
        "--shards",
        type=_count,
        required=True,
        metavar="N",
        help="how many files; best a multiple of all numbers of workers that you train with",
    )
    write.add_argument("--split", default="train", help="of tensorflow-datasets (default: %(default)s)")
    write.add_argument("--data-dir", metavar="DIR", help="where data sets of tensorflow-datasets were prepared")
    write.add_argument(
        "--label",
        metavar="COLUMN",
        help="of arrays by name and CSV: the column that is the label; elements are (dict of the others, label)",
    )
    write.add_argument(
        "--header",
        choices=["yes", "no"],
        help="whether the first row of CSV has the names of the columns (default: yes if it must be, else an error)",
    )
    write.add_argument("--delimiter", type=_character, metavar="C", help="of CSV (default: a comma; in .tsv a tab)")
    return parser


def _character(text: str) -> str:
    delimiter = "\t" if text == "\\t" else text
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise ValueError(text)
    return delimiter


_character.__name__ = "character"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


_count.__name__ = "number of files"
