"""Validates the options of the strategy `horovod`, and sets the variables that Horovod reads when it is initialised."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tfdistkit import env
from tfdistkit.errors import OptionError, TooLateError, explain
from tfdistkit.validation import is_integer, require_bool, require_integer, require_positive

OPS = ("average", "sum", "adasum")

_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"


def set_variables(
    *,
    is_initialized: bool,
    is_chief: bool,
    fuses: bool,
    fusion_threshold_bytes: int | None,
    cycle_time_ms: float | None,
    hierarchical: bool | None,
    timeline: str | os.PathLike | None,
    autotune: bool | None,
    timeout_s: float | None,
) -> None:
    """Sets Horovod's environment variables of this process for the options that are not None.

    Args:
        is_initialized: Whether Horovod is initialised, and so has read its variables.
        is_chief: Whether this is rank 0, which writes the timeline.
        fuses: Whether Horovod fuses operations, unless the user sets its threshold (`horovod_transport.order_matters`).
        fusion_threshold_bytes: Bytes.
        cycle_time_ms: Milliseconds.
        hierarchical: Whether to reduce within hosts first.
        timeline: A file.
        autotune: Whether Horovod tunes itself.
        timeout_s: Seconds, rounded to an integer for Horovod.

    Raises:
        OptionError: if a value is wrong.
        TooLateError: if Horovod is already initialised.
    """
    switches: dict[str, str] = {}
    if fusion_threshold_bytes is not None:
        threshold = require_integer("fusion_threshold_bytes", fusion_threshold_bytes, 0)  # 0: no fusion.
        switches[_FUSION_THRESHOLD] = str(threshold)
    for name, option, value, unit in (
        ("HOROVOD_CYCLE_TIME", "cycle_time_ms", cycle_time_ms, "milliseconds"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "timeout_s", timeout_s, "seconds"),
    ):
        if value is not None:
            require_positive(option, value, unit)
            switches[name] = str(max(1, round(value)) if option == "timeout_s" else value)
    for name, option, flag in (
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "hierarchical", hierarchical),
        ("HOROVOD_AUTOTUNE", "autotune", autotune),
    ):
        if flag is not None:
            switches[name] = str(int(require_bool(option, flag)))
    if timeline is not None:
        switches["HOROVOD_TIMELINE"] = str(_timeline_file(timeline, is_chief))
    if switches and is_initialized:
        raise TooLateError(
            explain(
                "Options of Horovod must be set before Horovod is initialised.",
                received=f"{', '.join(switches)} after `hvd.init()`",
                do="Remove `hvd.init()`, and give these options to the first `tfdistkit.strategy` of the process.",
            )
        )
    if not is_initialized and not fuses and env.text(_FUSION_THRESHOLD) is None:
        switches.setdefault(_FUSION_THRESHOLD, "0")
    for name, text in switches.items():
        env.put(name, text)


def _timeline_file(timeline: Any, is_chief: bool) -> Path:
    """Returns the path of the timeline; Horovod itself only logs a warning for a file that it cannot open."""
    if not isinstance(timeline, (str, os.PathLike)) or not str(timeline):
        raise OptionError(explain("`timeline` must be the path of a file to write.", received=f"timeline={timeline!r}"))
    path = Path(timeline).absolute()
    if is_chief and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise OptionError(
            explain(
                "`timeline` must be a file in an existing folder that this user may write to.",
                received=f"timeline={str(timeline)!r}",
            )
        )
    return path


def require_ranks(process_set: Any, size: int) -> list[list[int]]:
    """Returns a process set, or several, as lists of ranks.

    Args:
        process_set: A list of ranks, or several lists.
        size: The number of ranks of the job.

    Raises:
        OptionError: if an element is not a rank of the job, or a rank is listed twice.
    """
    several = isinstance(process_set, (list, tuple)) and process_set and isinstance(process_set[0], (list, tuple))
    lists = list(process_set) if several else [process_set]
    ranks = [rank for one in lists for rank in (one if isinstance(one, (list, tuple, range)) else [None])]
    valid = [rank for rank in ranks if is_integer(rank) and 0 <= rank < size]
    if len(valid) != len(ranks) or len(set(valid)) != len(ranks) or not all(lists):
        raise OptionError(
            explain(
                "`process_set` must be a list of ranks of this job, or several lists, with each rank at most once.",
                received=f"process_set={process_set!r}",
                expected=f"ranks from 0 to {size - 1}",
            )
        )
    return [sorted(one) for one in lists]
