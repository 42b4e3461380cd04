"""Plants faults of earlier versions again, one at a time: `python -m tests.fuzz.planted [FAULT ...]`.

Each is planted in the processes of a strategy, before it is made, and the fuzzer must find it within 500 programs.
A program counts as a find if it fails with the fault and passes without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

# The largest number of programs that the fuzzer may need for a fault.
EXAMPLES = 500

# The modules of most faults.
_GRADIENTS = "strategies.sync.gradients.gradient_scaling"
_LOSSES = "strategies.sync.loss_scaling"
_METRICS = "strategies.metrics.metric_updates"
_LOGS = "strategies.metrics.metric_sync"


def _replace(module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces a name by `make(original)`, also in the hooks that use it."""
    owner = importlib.import_module(f"tfdistkit.{module}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, last)
    new = make(original)
    setattr(owner, last, new)
    hooks = sys.modules.get("tfdistkit.strategies.keras_patches")
    for key, hook in (hooks._HOOKS if hooks else {}).items():
        if hook is original:
            hooks._HOOKS[key] = new  # type: ignore[union-attr]


def _unweighted_gradients() -> None:
    """Gradients are averaged over the replicas without weights."""

    def unweighted(original: Any) -> Any:
        return lambda step, gradients: [tf.math.scalar_mul(1.0 / step.replicas, g) for g in gradients]

    _replace(_GRADIENTS, "_parts_of_global_gradients", unweighted)
    _replace(_GRADIENTS, "is_stock_train_step", lambda original: lambda *args: False)


def _summed_own_losses() -> None:
    """Gradients of custom losses are summed without weights: N times too large."""
    _replace(
        _GRADIENTS,
        "_parts_of_global_gradients",
        lambda original: lambda step, gradients: gradients,
    )


def _averaged_losses_of_rows() -> None:
    """Per-row losses (`reduction=None`), whose gradient is a sum, are weighted like means."""
    _replace(_GRADIENTS, "_is_of_rows", lambda original: lambda step, loss: False)


def _clip_before_sum() -> None:
    """Each replica clips its own gradients before they are summed."""

    def clipping(original: Any) -> Any:
        def apply(keras_apply: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            present = [i for i, g in enumerate(grads) if g is not None]
            if hasattr(optimizer, "_clip_gradients"):
                for i, clipped in zip(present, optimizer._clip_gradients([grads[i] for i in present])):
                    grads[i] = clipped
            return original(keras_apply, optimizer, grads, trainable_variables)

        return apply

    _replace(_GRADIENTS, "apply", clipping)


def _local_masks() -> None:
    """Losses with masks are divided by the valid entries of the replica's own rows."""
    _replace(
        _LOSSES,
        "apply_mask",
        lambda original: lambda own, *args, **options: own(*args, **options),
    )


def _local_weights() -> None:
    """Means by sample weights are divided by the weights of the replica's own rows."""

    def local(original: Any) -> Any:
        def reduce_values(keras_own: Any, values: Any, sample_weight: Any = None, reduction: Any = "mean") -> Any:
            if reduction == "mean_with_sample_weight":
                return keras_own(values, sample_weight, reduction)
            return original(keras_own, values, sample_weight, reduction)

        return reduce_values

    _replace(_LOSSES, "reduce_values", local)


def _unweighted_trackers() -> None:
    """A mean of one number per replica ignores the replicas' numbers of rows."""
    _replace(
        _METRICS,
        "_weighted",
        lambda original: lambda step, metric, update, args, kwargs: (args, kwargs),
    )


def _unweighted_metric_functions() -> None:
    """Functions as metrics get the rows of one replica, and their means are not weighted."""
    _replace(_METRICS, "function_adds_up", lambda original: lambda function, axes=-1: True)
    _unweighted_trackers()


def _summed_extremes() -> None:
    """The state of every metric is summed, also of a maximum."""
    _replace(_METRICS, "adds_up_by_class", lambda original: lambda own: True)


def _wrong_rows() -> None:
    """Parts but the first begin one row too early: a row is trained on twice, the last one never."""

    def early(original: Any) -> Any:
        def rows_of(total: Any, parts: int, index: Any) -> Any:
            first, count = original(total, parts, index)
            return (max(first - 1, 0) if isinstance(first, int) else tf.maximum(first - 1, 0)), count

        return rows_of

    _replace("strategies.sync.batch_sharding", "rows_of", early)


def _forgotten_layer_state() -> None:
    """The state of layers is not synchronized."""
    _replace("strategies.variables", "LayerState.write_local", lambda original: lambda variable, value: None)


def _zero_logs() -> None:
    """Logs of a step without a tracker are 0."""
    _replace(
        _LOGS,
        "_weighted",
        lambda original: lambda step, values: [tf.zeros_like(v) for v in values],
    )


def _lost_position() -> None:
    """A training that is resumed begins its epoch with the first batches, in the order of the first epoch."""
    _replace("keras_adapter.data_position", "_skip_batches", lambda original: lambda data, number: None)

    def first_order(original: Any) -> Any:
        return lambda data, resumed: original(data, dataclasses.replace(resumed, iterator=0))

    _replace("keras_adapter.data_position", "FitData._seek", first_order)


def _repeated_lookups() -> None:
    """Rows of a table that every replica looks up count once for each of them."""
    _replace("strategies.sync.gradients.sparse_lookups", "with_rows_added", lambda original: lambda total, *_: total)


FAULTS: dict[str, Callable[[], None]] = {
    "unweighted_gradients": _unweighted_gradients,
    "summed_own_losses": _summed_own_losses,
    "averaged_losses_of_rows": _averaged_losses_of_rows,
    "clip_before_sum": _clip_before_sum,
    "local_masks": _local_masks,
    "local_weights": _local_weights,
    "unweighted_trackers": _unweighted_trackers,
    "unweighted_metric_functions": _unweighted_metric_functions,
    "summed_extremes": _summed_extremes,
    "wrong_rows": _wrong_rows,
    "forgotten_layer_state": _forgotten_layer_state,
    "zero_logs": _zero_logs,
    "lost_position": _lost_position,
    "repeated_lookups": _repeated_lookups,
}


def plant(name: str) -> None:
    """Plants a fault in this process; called before the strategy is made."""
    FAULTS[name]()


def find(name: str, engine: str, hunt: Any, say: Callable[[str], None], first: int = 0) -> bool:
    """Searches a program that shows a fault, and reports how many it took."""
    from fuzz import hunting, judging
    from fuzz.generating import draw_program
    from fuzz.pool import Pool

    faulty, start, unclear = Pool(engine, name), time.monotonic(), 0
    try:
        for number in range(EXAMPLES):
            program = draw_program(first + number)
            verdict = hunting.check(program, hunt.reference, faulty)
            if verdict.kind != judging.WRONG:
                continue
            details = repr(verdict.details)
            if "planted.py" in details:
                raise RuntimeError(f"{name} does not fit this code: {details}")
            if hunting.check(program, hunt.reference, hunt.pools[engine]).kind == judging.WRONG:
                unclear += 1
                continue
            minutes = (time.monotonic() - start) / 60
            say(
                f"{name}: found by program {number + 1} after {minutes:.1f} min ({unclear} failed without it as well): "
                f"{verdict.what}\n  {program}"
            )
            return True
    finally:
        faulty.close()
    say(f"{name}: NOT FOUND by {EXAMPLES} programs")
    return False


def main() -> int:
    """Plants each fault; returns 1 if one was not found."""
    from fuzz.hunting import Hunt

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.planted", description=__doc__)
    parser.add_argument("fault", nargs="*", choices=[[], *FAULTS], help="default: all")
    parser.add_argument("--strategy", default="mirrored")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first program")
    arguments = parser.parse_args()
    hunt = Hunt([arguments.strategy])
    try:
        found = [
            find(name, arguments.strategy, hunt, lambda line: print(line, flush=True), arguments.first)
            for name in arguments.fault or FAULTS
        ]
    finally:
        hunt.close()
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
