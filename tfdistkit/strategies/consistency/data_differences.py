"""What ranks that bring different data are told: which rank, in what, the likely line of the script, the cure."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from tfdistkit.errors import UnsupportedError, explain

Facts = dict[str, Any]

_CURE_PARTS = (
    "Give every rank the whole data, and let `fit` cut it: remove what takes a part of it by rank (`.shard`, "
    "`x[rank::n]`). If each rank shall read its part only, take tfdistkit.data.shard(dataset) instead."
)
_CURE_WHOLE = (
    "Give every rank the whole data: tfdistkit.data takes each rank's part of it. For data that each rank brings "
    'itself, say policy="off".'
)
# Lines of a script that bring no data.
_NO_CALLS = re.compile(r"\s*(#|import |from |[\"\']|def |class |print\(|@)")
_LIBRARIES = re.compile(r"site-packages|[/\\]tfdistkit[/\\](strategies|data|callbacks)[/\\]|^<|[/\\]multiprocessing")
_OFF = "tfdistkit.strategy(..., check_data=False) turns this comparison off."
# What is compared one after the other: name, what it is called, the cure, where it may stand in the script.
_COMPARED = (
    ("own_part", "whether the data was divided by rank already", "Call tfdistkit.data.shard on all ranks or on none.",
     r"\bshard\(|AutoShardPolicy"),
    ("spec", "shapes or dtypes of the elements", "Give every rank elements of the same kind.", r"\.map\(|\.batch\("),
    ("arguments", "an argument", "Call it with the same arguments on all ranks.", r"from_(arrays|files|tfds)\(|seed="),
    ("files", "the files, or how many elements they hold", _CURE_PARTS, r"from_files\(|glob|rank"),
    ("steps", "the number of steps", "Give every rank the same number of steps.", r"steps_per_epoch|steps="),
    ("class_weight", "`class_weight`", "Give every rank the same weights.", r"class_weight"),
    ("settings", "a number that the pipeline was made with", _CURE_PARTS,
     r"\.shard\(|\.skip\(|\.take\(|\.batch\(|\.shuffle\(|\[[^\]]*::"),
    ("arrays", "the arrays", _CURE_PARTS, r"\[[^\]]*rank[^\]]*\]|\[[^\]]*::|array_split|train_test_split"),
    ("generator", "whether a Python generator makes it", "Make the same pipeline on every rank.", r"from_generator"),
    ("random", "what shuffles", "Make the same pipeline on every rank.", r"\.shuffle\("),
    ("cardinality", "the number of elements", _CURE_PARTS, r"\.shard\(|\[[^\]]*rank[^\]]*\]|\[[^\]]*::"),
)  # fmt: skip


def difference(everyone: list[Facts], call: str, unordered: list[str]) -> UnsupportedError | None:
    """Returns the error for ranks that differ, or whose data has no order; None where only seeds differ.

    Args:
        everyone: What each process knows of its data.
        call: What reads it.
        unordered: What in this process's data has no order.
    """
    for rank, facts in enumerate(everyone):
        if facts["call"] != everyone[0]["call"]:
            return _other_calls(everyone[0]["call"], facts["call"], rank)
    for name, what, do, pattern in _COMPARED:
        for rank, facts in enumerate(everyone):
            if facts.get(name) != everyone[0].get(name):
                first, own = _shortest(everyone[0].get(name), facts.get(name))
                do = _CURE_WHOLE if do is _CURE_PARTS and call.startswith("tfdistkit.data.") else do
                return _error(call, f"they differ in {what}", rank, first, own, do, pattern)
    if not any(facts.get("unordered") for facts in everyone):
        return None
    return _without_order(call, unordered[0] if unordered else "`deterministic=False` on another rank")


def other_batches(call: str, rank: int, tensors: str) -> UnsupportedError:
    """Returns the error for ranks whose first batches differ.

    Args:
        call: What reads them.
        rank: The first rank that has another one than rank 0.
        tensors: In what they differ.
    """
    return UnsupportedError(
        explain(
            f"The ranks do not read the same data in `{call}`, so rows would be lost and others seen twice: the first "
            f"batch of an epoch is another one on rank {rank} than on rank 0.",
            received=f"a difference in {tensors}",
            expected="the same batch, in the same order, on all ranks; each rank cuts its own rows out of it",
            do=f"{_likely_line(r'shuffle|random|shard|rank|next[(]|generator|from_generator|Sequence|PyDataset')}"
            "Let nothing depend on the rank (a generator's order, a seed, a look at the dataset on one rank alone), or "
            f"take tfdistkit.data.shard(dataset) for data that each rank brings itself. {_OFF}",
        )
    )


def other_elements(call: str, rank: int, tensors: str) -> UnsupportedError:
    """Returns the error for ranks that divide what another generator yields on each of them.

    Args:
        call: What reads it.
        rank: The first rank that reads other elements than rank 0.
        tensors: In what they differ.
    """
    return UnsupportedError(
        explain(
            f"The ranks divide different data in `{call}`, so rows were lost and others seen twice in the first step: "
            f"the Python generator yields other elements, or another order, on rank {rank} than on rank 0.",
            received=f"a difference in {tensors.replace('of the batch', 'of the first elements')}",
            expected="the same elements in the same order on all ranks, of which tfdistkit.data.shard gives each its "
            "own",
            do=f"{_likely_line(r'from_generator|shuffle|permutation|random|rank')}Let the generator's order be the "
            'same on all ranks (a seed). Data that each rank brings itself is shard(dataset, "off"). '
            f"{_OFF}",
        )
    )


def _error(call: str, how: str, rank: int, first: Any, own: Any, do: str, pattern: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"The ranks do not bring the same data to `{call}`, so rows would be lost and others seen twice: {how}.",
            received=f"{first} on rank 0, {own} on rank {rank}",
            expected="the same data, in the same order, on all ranks; each rank cuts its own rows out of every batch",
            do=f"{_likely_line(pattern)}{do} {_OFF}",
        )
    )


def _without_order(call: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"The data of `{call}` comes in no fixed order, so every rank reads another one: rows would be lost and "
            "others seen twice.",
            received=f"a dataset with {what}",
            expected="the same order on all ranks",
            do=f"{_likely_line(r'deterministic|sloppy')}Remove it, or let each rank read its part only: "
            f"tfdistkit.data.shard(dataset) before it. {_OFF}",
        )
    )


def _other_calls(first: str, own: str, rank: int) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "The ranks do not call the same methods.",
            received=f"`{first}` on rank 0, `{own}` on rank {rank}",
            expected="the same calls, in the same order, on all ranks",
            do="Call `fit`, `evaluate`, `predict` and tfdistkit.data.shard on all ranks, not under `if rank == 0`.",
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
    """Returns which line of the user's may be meant, as a sentence: one that looks like it, or the call itself."""
    first = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path, called = Path(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back
        if _LIBRARIES.search(str(path)) or not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:called]
        alike = [n for n, line in enumerate(lines, start=1) if re.search(pattern, line) and not _NO_CALLS.match(line)]
        if alike:
            return _look_at(path, lines, alike[-1])
        first = first or _look_at(path, lines, called)
    return first


def _look_at(path: Path, lines: list[str], number: int) -> str:
    return f"Look at {path.name}:{number}: `{lines[number - 1].strip()[:80]}`. " if number <= len(lines) else ""
