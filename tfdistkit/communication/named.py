"""The option `compression` of the strategies: a name, or an object."""

from __future__ import annotations

from typing import Any

from tfdistkit.communication.reducer import Reducer, require_reducer
from tfdistkit.communication.sums import BF16, FP16
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.validation import require_choice

# The names are Horovod's.
COMPRESSIONS: dict[str, Any] = {"none": None, "fp16": FP16, "bf16": BF16}


def chosen_reducer(
    compression: str | Reducer, reducer: Reducer | None, algorithm: Reducer | None = None
) -> Reducer | None:
    """Returns the reducer that three options of a strategy choose; None for the exact sum.

    Args:
        compression: A name, or an object of `tfdistkit.compression`.
        reducer: A reducer of the user's own.
        algorithm: An object of `tfdistkit.algorithms`.

    Raises:
        OptionError: if one is wrong, or both are given.
    """
    require_reducer(reducer)
    if algorithm is not None:
        return _required(algorithm, compression, reducer)
    if reducer is not None and compression != "none":
        raise OptionError(
            explain(
                "`reducer` and `compression` must not be given together.",
                received=f"compression={compression!r}, reducer={reducer!r}",
            )
        )
    for name, given in (("compression", compression), ("reducer", reducer)):
        if isinstance(given, Reducer) and given.is_local:
            raise OptionError(
                explain(
                    f"An object of `tfdistkit.algorithms` must be given as `algorithm`, not as `{name}`.",
                    received=f"{name}={given.describe()}",
                    expected=f"algorithm={given.describe()}",
                )
            )
    if isinstance(compression, Reducer):
        return compression
    if not isinstance(compression, str):
        raise OptionError(
            explain(
                "`compression` must be a name, or an object of `tfdistkit.compression`.",
                received=f"compression={compression!r}",
                expected='"none", "fp16", "bf16", or tfdistkit.compression.PowerSGD(rank=4), say',
            )
        )
    made = COMPRESSIONS[require_choice("compression", compression, tuple(COMPRESSIONS))]
    return reducer if made is None else made()


def _required(algorithm: Any, compression: Any, reducer: Any) -> Reducer:
    if not isinstance(algorithm, Reducer) or not algorithm.is_local:
        raise OptionError(
            explain(
                "`algorithm` must be an object of `tfdistkit.algorithms`.",
                received=f"algorithm={algorithm!r}",
                expected="tfdistkit.algorithms.LocalSGD(every=100), say",
            )
        )
    if compression != "none" or reducer is not None:
        raise OptionError(
            explain(
                "`algorithm` must be given without `compression` and `reducer`: it decides what travels.",
                received=f"algorithm={algorithm.describe()}, compression={compression!r}, reducer={reducer!r}",
            )
        )
    return algorithm


def require_others(reducer: Reducer) -> None:
    """Refuses a reducer that does a part of the optimizer's work, for a job of one worker.

    Raises:
        UnsupportedError: for such a reducer: a single replica sends nothing, so its reducer is never called.
    """
    if reducer.replaces_optimizer:
        raise UnsupportedError(
            explain(
                "The momentum and clipping of a compression need several workers: one worker alone compresses nothing.",
                received=f"one worker, compression={reducer.describe()}",
                do="Start several workers (`tfdistkit run -np 2`), or give momentum and clipnorm to the optimizer.",
            )
        )
