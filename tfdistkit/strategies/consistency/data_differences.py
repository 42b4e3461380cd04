"""Errors for ranks with different data: the rank, the difference, the likely line of the script, and the fix."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.report import tracebacks

Facts = dict[str, Any]

_FIX_PARTS = (
    "Give every rank the whole data, of which each takes its rows: remove what selects a part by rank (`.shard`, "
    "`x[rank::n]`). To let each rank read only its own part, use tfdistkit.data.shard(dataset) instead."
)
_FIX_ARRAYS = (
    "Draw rows and noise with the same seed on all ranks: keras.utils.set_random_seed(7) before the data is made, or a "
    f"seed of the function that draws. {_FIX_PARTS}"
)
_FIX_WHOLE = (
    "Give every rank the whole data: tfdistkit.data selects each rank's part. For data that is already divided by "
    'rank, set policy="off".'
)
# Lines of a script that do not load data, and those that give all ranks one seed.
_NO_CALLS = re.compile(r"\s*(#|import |from |[\"\']|def |class |print\(|@|.*set_random_seed\((?!.*rank))")
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_OFF = "tfdistkit.strategy(..., check_data=False) turns this comparison off."
# Facts in the order of comparison: name, its name in an error, the fix, a pattern for the likely line of the script.
_COMPARED = (
    ("own_part", "whether the data was divided by rank already", "Call tfdistkit.data.shard on all ranks or on none.",
     r"\bshard\(|AutoShardPolicy"),
    ("spec", "shapes or dtypes of the elements", "Give every rank elements of the same kind.", r"\.map\(|\.batch\("),
    ("arguments", "an argument", "Call it with the same arguments on all ranks.", r"from_(arrays|files|tfds)\(|seed="),
    ("files", "the files, or their number of elements", _FIX_PARTS, r"from_files\(|glob|rank"),
    ("steps", "the number of steps", "Give every rank the same number of steps.", r"steps_per_epoch|steps="),
    ("metrics", "the number of metrics", "Give `compile` the same `metrics` on all ranks, which compute them together.",
     r"metrics="),
    ("class_weight", "`class_weight`", "Give every rank the same weights.", r"class_weight"),
    ("settings", "an argument of the pipeline", _FIX_PARTS,
     r"\.shard\(|\.skip\(|\.take\(|\.batch\(|\.shuffle\(|\[[^\]]*::"),
    ("arrays", "the arrays", _FIX_ARRAYS,
     r"\[[^\]]*rank[^\]]*\]|\[[^\]]*::|array_split|train_test_split|"
     r"random\.(rand|normal|uniform|permutation|shuffle|choice)|default_rng\(\)"),
    ("generator", "whether a Python generator yields it", "Make the same pipeline on every rank.", r"from_generator"),
    ("random", "the operations that shuffle", "Make the same pipeline on every rank.", r"\.shuffle\("),
    ("cardinality", "the number of elements", _FIX_PARTS, r"\.shard\(|\[[^\]]*rank[^\]]*\]|\[[^\]]*::"),
)  # fmt: skip


def difference(everyone: list[Facts], call: str, unordered: list[str]) -> UnsupportedError | None:
    """Returns the error for ranks whose data differs or has no fixed order; None where only seeds differ.

    Args:
        everyone: The facts of each process about its data.
        call: The method that reads it.
        unordered: The operations without a fixed order in this process's data.
    """
    for rank, facts in enumerate(everyone):
        if facts["call"] != everyone[0]["call"]:
            return other_calls(everyone[0]["call"], facts["call"], rank)
    for name, what, do, pattern in _COMPARED:
        for rank, facts in enumerate(everyone):
            if facts.get(name) != everyone[0].get(name):
                first, own = _shortest(everyone[0].get(name), facts.get(name))
                do = _FIX_WHOLE if do in (_FIX_PARTS, _FIX_ARRAYS) and call.startswith("tfdistkit.data.") else do
                return _error(call, f"they differ in {what}", rank, first, own, do, pattern)
    if not any(facts.get("unordered") for facts in everyone):
        return None
    return _without_order(call, unordered[0] if unordered else "`deterministic=False` on another rank")


def other_batches(call: str, rank: int, tensors: str) -> UnsupportedError:
    """Returns the error for ranks whose first batches differ.

    Args:
        call: The method that reads them.
        rank: The first rank whose batch differs from that of rank 0.
        tensors: The difference.
    """
    return UnsupportedError(
        explain(
            f"All ranks must read the same data in `{call}`, or rows are lost and others repeated: the first batch of "
            f"an epoch on rank {rank} differs from that on rank 0.",
            received=f"a difference in {tensors}",
            expected="the same batch, in the same order, on all ranks; each rank takes its own rows from it",
            do=f"{_likely_line(r'shuffle|random|shard|rank|next[(]|generator|from_generator|Sequence|PyDataset')}"
            "Remove what depends on the rank (a generator's order, a seed, a read of the dataset on one rank only). "
            "Give each generator random numbers of its own (`np.random.default_rng(7)`): those of NumPy that several "
            "of them share depend on the speed of threads. Or use tfdistkit.data.shard(dataset) for data that is "
            f"divided by rank. {_OFF}",
        )
    )


def equal_parts(call: str) -> UnsupportedError:
    """Returns the error for ranks that say that they bring rows of their own, and bring the same.

    Args:
        call: The method that reads them.
    """
    return UnsupportedError(
        explain(
            f"With `AutoShardPolicy.OFF` every rank must bring rows of its own to `{call}`, or each row is read once "
            "for every rank.",
            received="the same data on all ranks",
            expected="the whole data without this policy, of which each rank takes its rows; or a part for each rank",
            do=f"{_likely_line(r'AutoShardPolicy|auto_shard_policy')}Remove it, or keep it and shard the data by rank. "
            f"{_OFF}",
        )
    )


def shared_cache(everyone: list[Facts], call: str) -> UnsupportedError | None:
    """Returns the error for two ranks of a host that keep elements in one file; None where no two do.

    Args:
        everyone: The facts of each process about its data.
        call: The method that reads it.
    """
    taken: dict[tuple[str, str], int] = {}
    for rank, facts in enumerate(everyone):
        for file, can_share in facts.get("caches", ()):
            first = taken.setdefault((facts["host"], file), rank)
            if first != rank and not can_share:
                return _one_cache(file, f"rank {first} and rank {rank} on one host", call)
    return None


_OF_ONE_LENGTH = (
    "With `repeat()` after tfdistkit.data, the parts of all workers must be of one length in `{}`: each worker repeats "
    "its own, and a step would train on rows that are not of one batch."
)
_REPEATS = (
    "Divide the repeated data: `tfdistkit.data.shard(dataset.repeat())`. Or make the parts even (`even_steps=`), or "
    "remove `repeat()`: the data then decides the steps of an epoch."
)


def uneven_repeats(everyone: list[Facts] | None, call: str) -> UnsupportedError | None:
    """Returns the error for parts of different lengths that each worker repeats by itself; None for even ones.

    Args:
        everyone: The facts of each process about its data; None if they are equal.
        call: The method that reads it.
    """
    parts = [facts.get("repeated") or [] for facts in everyone or []]
    for sizes in itertools.zip_longest(*parts):
        if len(set(sizes)) > 1:
            return UnsupportedError(
                explain(
                    _OF_ONE_LENGTH.format(call),
                    received=" and ".join(f"{size} elements on rank {rank}" for rank, size in enumerate(sizes)),
                    expected="parts of one length, or a part of the repeated data",
                    do=f"{_likely_line(r'repeat')}{_REPEATS} {_OFF}",
                )
            )
    return None


def warn_of_repeats(call: str) -> None:
    """Warns of parts of unknown lengths that each worker repeats by itself."""
    warnings.warn(
        explain(_OF_ONE_LENGTH.format(call), received="a dataset of unknown length", do=_REPEATS),
        stacklevel=2,
    )


def warn_of_selection(method: str, call: str) -> None:
    """Warns of a method that selects from each worker's part.

    Args:
        method: Its name.
        call: The method that reads the data.
    """
    warnings.warn(
        explain(
            f"`{method}` should come before tfdistkit.data divides the data of `{call}`: after it, each worker applies "
            "it to its own part, and steps have other rows than with one worker.",
            received=f"`{method}` of a part",
            do=f"Call it first: `tfdistkit.data.shard(dataset.{method}(...))`.",
        ),
        stacklevel=2,
    )


def _one_cache(file: str, ranks: str, call: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"Each rank must have a file of its own for `.cache(filename)`, which `{call}` fills.",
            received=f"{file} for {ranks}",
            expected="a file for each rank, or one that is complete before training and holds the whole data",
            do='Write the rank into its name: `.cache(f"{path}-{tfdistkit.rank()}")`, or cache in memory: `.cache()`.',
        )
    )


def other_calls(first: str, own: str, rank: int) -> UnsupportedError:
    """Returns the error for ranks that call other methods.

    Args:
        first: The call of rank 0.
        own: The call of the other rank.
        rank: That rank.
    """
    return UnsupportedError(
        explain(
            "All ranks must call the same methods, in the same order.",
            received=f"`{first}` on rank 0, `{own}` on rank {rank}",
            do="Call what reads data (`fit`, `evaluate`, tfdistkit.data.shard) on all ranks, not under `if rank == 0`.",
        )
    )


def other_whole_batches(call: str, number: int, rank: int, what: str) -> UnsupportedError:
    """Returns the error for ranks that pass other batches to a method that takes a whole batch.

    Args:
        call: That method.
        number: The number of the call, from 1.
        rank: The first rank whose batch differs from that of rank 0.
        what: The difference.
    """
    return UnsupportedError(
        explain(
            f"All ranks must give `{call}` the same whole batch, of which each takes its rows, or rows are lost: the "
            f"batch of call {number} on rank {rank} differs from that on rank 0.",
            received=f"a difference in {what} on rank {rank}",
            expected="the same batch on all ranks",
            do=f"{_likely_line(r'shuffle|random|rank|next[(]|choice|permutation|randint')}Give every rank the whole "
            "same batch: draw rows and noise with the same seed on all ranks (keras.utils.set_random_seed(7)), and "
            f"select no part by rank. {_OFF}",
        )
    )


def other_elements(call: str, rank: int, tensors: str) -> UnsupportedError:
    """Returns the error for ranks that shard a generator which yields other elements on each of them.

    Args:
        call: The method that reads it.
        rank: The first rank whose elements differ from those of rank 0.
        tensors: The difference.
    """
    return UnsupportedError(
        explain(
            f"All ranks must shard the same data in `{call}`, or rows are lost and others repeated, as in the first "
            f"step: the Python generator yields other elements, or another order, on rank {rank} than on rank 0.",
            received=f"a difference in {tensors.replace('of the batch', 'of the first elements')}",
            expected="the same elements in the same order on all ranks; tfdistkit.data.shard selects each rank's part",
            do=f"{_likely_line(r'from_generator|shuffle|permutation|random|rank')}Make the generator's order the same "
            'on all ranks (a seed). For data that is already divided by rank, use shard(dataset, "off"). '
            f"{_OFF}",
        )
    )


def _error(call: str, how: str, rank: int, first: Any, own: Any, do: str, pattern: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"All ranks must give `{call}` the same data, or rows are lost and others repeated: {how}.",
            received=f"{first} on rank 0, {own} on rank {rank}",
            expected="the same data, in the same order, on all ranks; each rank takes its own rows from every batch",
            do=f"{_likely_line(pattern)}{do} {_OFF}",
        )
    )


def _without_order(call: str, what: str) -> UnsupportedError:
    before = "" if call.startswith("tfdistkit.data.") else "call tfdistkit.data.shard(dataset) before it, or "
    return UnsupportedError(
        explain(
            f"The data of `{call}` must have a fixed order, or each rank reads another order: rows are lost and others "
            "repeated.",
            received=f"a dataset with {what}",
            expected="the same order on all ranks",
            do=f"{_likely_line(r'shuffle_files|deterministic(?!.*True)|sloppy')}Remove it (of `tfds.load`: pass "
            "`read_config=tfds.ReadConfig(shuffle_seed=7)` with `shuffle_files=True`), or let each rank read only its "
            f"part: {before}read files with tfdistkit.data.from_files or from_tfds. {_OFF}",
        )
    )


def _shortest(first: Any, own: Any) -> tuple[Any, Any]:
    """Returns the parts in which two values differ, as the user would write them."""
    if isinstance(first, list) and isinstance(own, list) and len(first) == len(own):
        first, own = next((a, b) for a, b in zip(first, own) if a != b)
    return _written(first), _written(own)


def _written(value: Any) -> str:
    if isinstance(value, list) and len(value) == 3 and isinstance(value[1], list):
        return f"{value[0]} {value[1]} (hash {value[2] & 0xFFFFFF:06x})"  # An array.
    if isinstance(value, list) and len(value) == 3:
        return f"{value[0]}({value[1]}={value[2]})"
    if isinstance(value, list) and len(value) == 2:
        return f"{value[0]}={value[1]!r}"
    if isinstance(value, bool):
        return "divided" if value else "not divided"
    return str(value)


def _likely_line(pattern: str) -> str:
    """Returns a sentence with the likely line of the user's code: the last that matches, or the call itself."""
    first = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path, called, is_other = Path(frame.f_code.co_filename), frame.f_lineno, tracebacks.is_of_library(frame)
        frame = frame.f_back
        if is_other or _PACKAGES.search(str(path)) or not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:called]
        matches = [n for n, line in enumerate(lines, start=1) if re.search(pattern, line) and not _NO_CALLS.match(line)]
        if matches:
            return _look_at(path, lines, matches[-1])
        first = first or _look_at(path, lines, called)
    return first


def _look_at(path: Path, lines: list[str], number: int) -> str:
    return f"Look at {path.name}:{number}: `{lines[number - 1].strip()[:80]}`. " if number <= len(lines) else ""
