"""Implements `tfdistkit data`: writes data sets as evenly sharded TFRecords."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from tfdistkit import env
from tfdistkit.cli.parser import Parser

_DESCRIPTION = """\
Writes a data set as TFRecords in files whose sizes differ by at most one element, reads them back and compares counts
and checksums. OUT appears atomically, after the verification; tfdistkit.data.from_files(OUT) reads it."""

_EPILOG = """\
SOURCE is one of:
  digits.npz, digits.npy     arrays: an element is a row, or a dict of rows for named arrays
  wine.csv, wine.tsv         CSV: an element is a row, a dict of int64, float64 and strings by name
  'old/*.tfrecord', a folder TFRecords: an element is a record
  mnist, tfds:mnist, folder  a prepared data set of tensorflow-datasets (pip install 'tensorflow-datasets>=4.9'
                             importlib_resources); nothing is downloaded; OUT is such a folder, too
or a pattern ('part-*.csv') of files and folders with the same columns.

examples:
  tfdistkit data write digits.npz digits --shards 8
  tfdistkit data write wine.csv wine --label quality --shards 8
  tfdistkit data write mnist mnist-train --split train --shards 8

exit codes:
  0 written and verified; 1 failed, and OUT does not exist; 2 wrong usage, or invalid SOURCE"""

# Options passed unchanged to the writing process.
_PASSED = ("source", "out", "shards", "split", "data_dir", "label", "delimiter")
# The module of the training wing that replaces this process, and loads TensorFlow.
_WRITER = "tfdistkit.data.writing.command"


def main(arguments: Sequence[str]) -> int:
    """Runs the command: replaces this process by the writing one.

    Args:
        arguments: What follows `tfdistkit data`.

    Returns:
        The exit code, see `tfdistkit data write --help`.
    """
    options = make_parser().parse_args(list(arguments))
    passed = {name: getattr(options, name) for name in _PASSED}
    passed["header"] = None if options.header is None else options.header == "yes"
    # Writing needs no GPU, and none of TensorFlow's start-up lines.
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": env.text("TF_CPP_MIN_LOG_LEVEL") or "3"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", _WRITER, json.dumps(passed)], env.child_env(quiet))


def make_parser() -> Parser:
    """Makes the parser of the command."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="tfdistkit data", description=_DESCRIPTION, formatter_class=form, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="write")
    write = actions.add_parser(
        "write",
        help="write a data set as TFRecords",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=form,
        allow_abbrev=False,
    )
    write.add_argument("source", metavar="SOURCE", help="the data set to write, see below")
    write.add_argument("out", metavar="OUT", help="the folder to create")
    write.add_argument(
        "--shards",
        type=_count,
        required=True,
        metavar="N",
        help="the number of files; choose a multiple of all numbers of workers that you train with",
    )
    write.add_argument("--split", default="train", help="the split of tensorflow-datasets (default: %(default)s)")
    write.add_argument(
        "--data-dir", metavar="DIR", help="the folder with the prepared data sets of tensorflow-datasets"
    )
    write.add_argument(
        "--label",
        metavar="COLUMN",
        help="the label column of named arrays or CSV; elements are then (dict of the other columns, label)",
    )
    write.add_argument(
        "--header",
        choices=["yes", "no"],
        help="whether the first row of CSV has column names (default: yes if that is certain, else an error)",
    )
    write.add_argument(
        "--delimiter", type=_character, metavar="C", help="the delimiter of CSV (default: a comma; in .tsv a tab)"
    )
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
