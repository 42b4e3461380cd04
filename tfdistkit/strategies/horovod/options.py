"""The options of the strategy `horovod`, checked; those that Horovod itself reads when it is initialised are set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tfdistkit import env
from tfdistkit.errors import OptionError, TooLateError, explain, nearest

OPS = ("average", "sum", "adasum")
COMPRESSIONS = ("none", "fp16", "bf16")


def require_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises:
    OptionError: if the value of an option is none of those that it can have.
    """
    if value not in allowed:
        raise OptionError(
            explain(
                f"`{name}` is unknown.{nearest(str(value), list(allowed))}",
                received=f"{name}={value!r}",
                expected=f"one of: {', '.join(allowed)}",
            )
        )


def require_flag(name: str, value: Any) -> None:
    """Raises:
    OptionError: if the value of an option is neither true nor false.
    """
    if not isinstance(value, bool):
        raise OptionError(explain(f"`{name}` is no yes or no.", received=f"{name}={value!r}", expected="True or False"))


def set_switches(
    *,
    is_initialized: bool,
    is_chief: bool,
    fusion_threshold_bytes: int | None,
    cycle_time_ms: float | None,
    hierarchical: bool | None,
    timeline: str | os.PathLike | None,
    autotune: bool | None,
    timeout_s: float | None,
) -> None:
    """Sets Horovod's own switches for this process, of those options that are not None.

    Args:
        is_initialized: Whether Horovod has read them already.
        is_chief: Whether this is rank 0, which writes the timeline.
        fusion_threshold_bytes: Bytes.
        cycle_time_ms: Milliseconds.
        hierarchical: Whether to reduce within hosts first.
        timeline: A file.
        autotune: Whether Horovod tunes itself.
        timeout_s: Seconds; Horovod knows whole ones.

    Raises:
        OptionError: if a value is wrong.
        TooLateError: if Horovod has read its switches.
    """
    switches: dict[str, str] = {}
    if fusion_threshold_bytes is not None:
        _require_number("fusion_threshold_bytes", fusion_threshold_bytes, int, "whole bytes, from 0 (no fusion)", 0)
        switches["HOROVOD_FUSION_THRESHOLD"] = str(fusion_threshold_bytes)
    for name, option, value, unit in (
        ("HOROVOD_CYCLE_TIME", "cycle_time_ms", cycle_time_ms, "milliseconds"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "timeout_s", timeout_s, "seconds"),
    ):
        if value is not None:
            _require_number(option, value, (int, float), f"{unit}, more than 0")
            switches[name] = str(max(1, round(value)) if option == "timeout_s" else value)
    for name, option, flag in (
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "hierarchical", hierarchical),
        ("HOROVOD_AUTOTUNE", "autotune", autotune),
    ):
        if flag is not None:
            require_flag(option, flag)
            switches[name] = str(int(flag))
    if timeline is not None:
        switches["HOROVOD_TIMELINE"] = str(_timeline_file(timeline, is_chief))
    if switches and is_initialized:
        raise TooLateError(
            explain(
                "Horovod was initialised before its options were known.",
                received=", ".join(switches),
                do="Remove `hvd.init()`, and give these options to the first `tfdistkit.strategy`: it makes it.",
            )
        )
    for name, text in switches.items():
        env.put(name, text)


def _require_number(name: str, value: Any, kinds: Any, expected: str, least: int | None = None) -> None:
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not (value > 0 if least is None else value >= least) or value == float("inf"):
        raise OptionError(explain(f"`{name}` is out of range.", received=f"{name}={value!r}", expected=expected))


def _timeline_file(timeline: Any, is_chief: bool) -> Path:
    """Horovod only logs a warning when it cannot open the file."""
    if not isinstance(timeline, (str, os.PathLike)) or not str(timeline):
        raise OptionError(
            explain("`timeline` is no path.", received=f"timeline={timeline!r}", expected="a file to write")
        )
    path = Path(timeline).absolute()
    if is_chief and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise OptionError(
            explain(
                "`timeline` cannot be written.",
                received=f"timeline={str(timeline)!r}",
                expected="a file in a folder that exists and that this user may write to",
            )
        )
    return path


def require_ranks(process_set: Any, size: int) -> list[list[int]]:
    """Returns a process set, or several, as lists of ranks.

    Args:
        process_set: A list of ranks, or several.
        size: How many ranks the job has.

    Raises:
        OptionError: if these are no ranks, or a rank is in two lists.
    """
    several = isinstance(process_set, (list, tuple)) and process_set and isinstance(process_set[0], (list, tuple))
    lists = list(process_set) if several else [process_set]
    ranks = [rank for one in lists for rank in (one if isinstance(one, (list, tuple, range)) else [None])]
    whole = [rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < size]
    if len(whole) != len(ranks) or len(set(whole)) != len(ranks) or not all(lists):
        raise OptionError(
            explain(
                "`process_set` holds no ranks.",
                received=f"process_set={process_set!r}",
                expected=f"some of the ranks 0 to {size - 1}, or several lists of them, each rank once at most",
            )
        )
    return [sorted(one) for one in lists]
