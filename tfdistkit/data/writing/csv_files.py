"""Reads CSV files for `tfdistkit data write`: columns of int64, float64 and strings."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tfdistkit.data.writing.array_files import Table
from tfdistkit.errors import OptionError, explain

# No leading zeros: codes such as "01234" stay strings.
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NOT_FINITE = re.compile(r"(nan|[+-]?inf)", re.IGNORECASE)
_MISSING = {"", "na", "n/a", "null", "none", "?", "-"}
_INT64 = range(-(2**63), 2**63)
_OTHER_DELIMITERS = ";\t|"

Cells = list[str]


@dataclass(frozen=True)
class CsvOptions:
    """Options for reading CSV files.

    Args:
        header: Whether the first row has the column names; None detects it.
        delimiter: The separator of cells; None means a comma, and a tab in `.tsv`.
    """

    header: bool | None = None
    delimiter: str | None = None


def read_csv(path: str, options: CsvOptions) -> Table:
    """Reads a file once to find its columns and their dtypes.

    Args:
        path: A file in UTF-8.
        options: How to read it.

    Raises:
        OptionError: if it cannot be read, or its header or columns are ambiguous.
    """
    delimiter = options.delimiter or ("\t" if path.lower().endswith(".tsv") else ",")
    rows = _read(path, delimiter)
    _, first = next(rows, (0, []))
    if not first:
        raise _wrong(path, "it is empty", None)
    if len(first) == 1 and options.delimiter is None:
        for other in _OTHER_DELIMITERS:
            if other in first[0]:
                raise _wrong(path, f"the first row is one cell, with {other!r} in it", f"Pass --delimiter {other!r}.")
    columns = [_Column() for _ in first]
    count = 0
    for line, cells in rows:
        count += 1
        for column, cell in zip(columns, cells):
            column.add(cell, line)
    header = options.header
    if header is None:
        header = _require_header(path, first, columns)
    names = [name.strip() for name in first] if header else [f"column{i}" for i in range(len(first))]
    if not header:
        count += 1
        for column, cell in zip(columns, first):
            column.add(cell, 1)
    _require_names(path, names)
    for name, column in zip(names, columns):
        if column.is_number and column.empty_line:
            what = f"line {column.empty_line}: a cell of {name!r} is empty, its other cells are numbers"
            raise _wrong(path, what, "Fill it in; write nan for a missing number.")
    notes = tuple(f"{path}: {column.note(name)}" for name, column in zip(names, columns) if column.is_mixed)
    dtypes = [column.dtype for column in columns]

    def read() -> Iterator[dict[str, np.ndarray]]:
        again = _read(path, delimiter)
        if header:
            next(again, None)
        for _, cells in again:
            yield {name: _value(cell, dtype) for name, dtype, cell in zip(names, dtypes, cells)}

    return Table(tuple((name, dtype, ()) for name, dtype in zip(names, dtypes)), count, read, notes)


class _Column:
    """Infers the dtype of a column from its cells."""

    def __init__(self) -> None:
        self._integers = self._floats = 0
        self.empty_line: int | None = None
        self._text: tuple[int, str] | None = None

    def add(self, cell: str, line: int) -> None:
        """Adds the next cell."""
        number = cell.strip()
        if not number:
            self.empty_line = self.empty_line or line
        elif _INTEGER.fullmatch(number) and int(number[:25]) in _INT64:
            self._integers += 1
        elif _is_float(number):
            self._floats += 1
        elif self._text is None:
            self._text = (line, cell)

    @property
    def is_number(self) -> bool:
        """Whether all non-empty cells are numbers."""
        return self._text is None and self._integers + self._floats > 0

    @property
    def is_mixed(self) -> bool:
        """Whether some cells are numbers, but not all."""
        return self._text is not None and self._integers + self._floats > 0

    @property
    def dtype(self) -> str:
        """`int64` or `float64` if all cells are numbers, else `string`."""
        if not self.is_number:
            return "string"
        return "float64" if self._floats else "int64"

    def note(self, name: str) -> str:
        """Explains why a mixed column is read as strings."""
        line, cell = self._text or (0, "")
        numbers = self._integers + self._floats
        return f"{name!r} is read as strings: line {line} has {cell[:40]!r}, {numbers} other cells are numbers"


def _is_float(text: str) -> bool:
    if _NOT_FINITE.fullmatch(text):
        return True
    return bool(_FLOAT.fullmatch(text)) and not _is_whole(text) and math.isfinite(float(text))


def _is_whole(text: str) -> bool:
    """Returns whether a text is an integer: one too large for int64 stays a string, as float64 would round it."""
    return bool(_INTEGER.fullmatch(text))


def _value(cell: str, dtype: str) -> np.ndarray:
    if dtype == "string":
        return np.asarray(cell)
    return np.asarray(int(cell), dtype) if dtype == "int64" else np.asarray(float(cell), dtype)


def _read(path: str, delimiter: str) -> Iterator[tuple[int, Cells]]:
    """Reads the non-blank rows, each with the number of its last line."""
    width = 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            # strict: an unclosed quote would swallow the rest of the file.
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for cells in reader:
                if not cells:
                    continue
                width = width or len(cells)
                if len(cells) != width:
                    what = f"line {reader.line_num} has {len(cells)} cells, the first row has {width}"
                    too_many = 'Quote cells that hold the delimiter: "a, b".'
                    too_few = f"Keep the delimiters of a missing cell: `1{delimiter}{delimiter}3`."
                    raise _wrong(path, what, too_many if len(cells) > width else too_few)
                yield reader.line_num, cells
    except UnicodeDecodeError as error:
        raise _wrong(path, f"it is not UTF-8 ({error.reason})", "Convert it: iconv -f latin1 -t utf-8.") from None
    except csv.Error as error:
        raise _wrong(path, f"line {reader.line_num}: {error}", 'Close every quote; a quote in quotes is "".') from None
    except OSError as error:
        raise _wrong(path, error.strerror or str(error), None) from None


def _require_header(path: str, first: Cells, columns: Sequence[_Column]) -> bool:
    """Returns True if the first row has words above columns of numbers; raises an error if it is ambiguous."""
    numbers = [cell.strip() for cell, column in zip(first, columns) if column.is_number]

    def is_word(cell: str) -> bool:
        return cell.lower() not in _MISSING and not _FLOAT.fullmatch(cell) and not _NOT_FINITE.fullmatch(cell)

    if numbers and all(map(is_word, numbers)):
        return True
    if "" in numbers and any(map(is_word, first)):
        raise _wrong(
            path,
            f"column {first.index('')} (from 0) has no name",
            "Name it in the first row, or remove it (pandas: `to_csv(index=False)`); or pass --header no.",
        )
    shown = ", ".join(first)
    raise _wrong(
        path,
        f"its first row may be column names or data ({shown[:60]})",
        "Pass --header yes; or --header no, which names the columns column0, column1, ...",
    )


def _require_names(path: str, names: Sequence[str]) -> None:
    if "" in names:
        raise _wrong(path, f"column {names.index('')} (from 0) has no name", "Name it in the first row.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _wrong(path, f"several columns have the same name: {', '.join(twice)}", "Rename them.")


def _wrong(path: str, why: str, do: str | None) -> OptionError:
    return OptionError(explain(f"The CSV file cannot be read: {why}.", received=path, do=do))
