"""`StepTimer`: measures training speed and finds its bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdistkit.callbacks.chief import writes_files
from tfdistkit.callbacks.process_group import Ranks, ranks_of
from tfdistkit.communication.traffic import Sent
from tfdistkit.report.progress import leave_communication
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.step_clock import attach

# Below this percentage of computing the bottleneck is printed.
_ENOUGH_COMPUTING = 90.0
# The order in the logs and in the printed line.
_SHARES = ("computing", "communication", "input", "callbacks")
_ADVICE = {
    "communication": "use a larger batch, or fewer and faster links between the ranks",
    "input": "use `prefetch`, parallel `map` calls, or `cache` in the dataset",
    "callbacks": "use callbacks that run on fewer batches, or `steps_per_execution`",
    "computing": "its peers wait for this rank",
}


class StepTimer(keras.callbacks.Callback):
    """Measures examples per second, and the shares of computing, communication, and waiting for data.

    After each epoch the chief prints a line such as

        Epoch 3: 1520 examples/s, 93.1 % computing, 5.2 % communication, 1.7 % input, 0.0 % callbacks
        Epoch 3: 6.88 MB sent a step by each worker, 0.069 of full precision

    and, if less than 90 % was computing, the bottleneck and its rank. The logs get `examples_per_second`,
    `computing`, `communication`, `input` and `callbacks` (percentages), `bytes_per_step` and `bytes_ratio` (to full
    precision), and with an algorithm such as `LocalSGD` `steps_per_sync` and `seconds_per_sync`: means over the
    ranks, the same on all of them. docs/callbacks.md explains the measurement. The first execution of a step, in
    which TensorFlow traces it, is not counted, nor is validation.

    Every rank must have it; callbacks after it in the list see its logs. Under `parameter_server` the coordinator
    reports means over the workers; with `jit_compile=True` it reports only times measured outside of a step.

    Args:
        verbose: 0 prints no line.

    Example:
        ```python
        model.fit(dataset, callbacks=[tfdistkit.callbacks.StepTimer(), keras.callbacks.CSVLogger("log.csv")])
        ```
    """

    def __init__(self, verbose: int = 1):
        super().__init__()
        self.verbose = verbose
        self._clock: Any = None
        self._ranks: Ranks | None = None
        keras_patches.install()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock of the steps."""
        self._clock, self._ranks = attach(self.model), ranks_of(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the clock."""
        if self._clock is not None and self._ranks is not None:
            self._clock.reset()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the times of the epoch to the logs, and prints them on the chief."""
        if self._clock is None or self._ranks is None:
            return
        times = self._clock.times()
        total = times.total_s
        row = 100.0 * np.array([0.0, times.communication_s, times.input_s, times.outside_s]) / total
        row *= min(1.0, 100.0 / max(row.sum(), 1e-9))  # Waiting times may overlap.
        row[0] = 100.0 - row.sum()
        sent = self._sent()
        given = [*row, times.rows / total, total, *sent]
        of_ranks: np.ndarray = np.array(given, np.float64)[None]
        if not self._ranks.is_single:
            of_ranks = self._ranks.gather(of_ranks[0])
        means = of_ranks.mean(0)
        total_s, *mean_sent = map(float, means[len(_SHARES) + 1 :])
        told = _told(Sent(*mean_sent), total_s, self.model) if sent else {}
        if logs is not None:
            shares = dict(zip(_SHARES, map(float, means)))
            logs.update({"examples_per_second": float(means[len(_SHARES)]), **shares, **told})
        if times.executions and writes_files(self.model):
            if told:
                leave_communication({"epoch": epoch + 1, **told})
            if self.verbose:
                self._print(epoch, means, of_ranks, told)

    def _sent(self) -> Sequence[float]:
        traffic = getattr(self._clock, "traffic", None)
        return () if traffic is None else traffic.sent()

    def _print(self, epoch: int, means: np.ndarray, of_ranks: np.ndarray, told: dict[str, float]) -> None:
        shares = ", ".join(f"{share:.1f} % {name}" for name, share in zip(_SHARES, means))
        print(f"\nEpoch {epoch + 1}: {means[len(_SHARES)]:.4g} examples/s, {shares}")
        if told.get("bytes_per_step"):
            print(f"Epoch {epoch + 1}: {_in_words(told)}")
        if means[0] >= _ENOUGH_COMPUTING:
            return
        what, rank = _bottleneck(of_ranks)
        where = "" if len(of_ranks) == 1 or rank is None else f" on rank {rank}"
        print(f"Epoch {epoch + 1}: training waits for {what}{where}: {_ADVICE[what]}.")


def _told(sent: Sent, total_s: float, model: keras.Model) -> dict[str, float]:
    """Returns what the logs get of the bytes of an epoch."""
    told = {"bytes_per_step": sent.size_bytes / max(sent.steps, 1.0), "bytes_ratio": sent.ratio}
    reducer = getattr(model.distribute_strategy, "reducer", None)
    if reducer is not None and reducer.is_local:
        told["steps_per_sync"] = sent.steps / max(sent.syncs, 1.0)
        told["seconds_per_sync"] = total_s / max(sent.syncs, 1.0)
    return told


def _in_words(told: dict[str, float]) -> str:
    size, unit = told["bytes_per_step"], "bytes"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    text = f"{size:.3g} {unit} sent a step by each worker, {told['bytes_ratio']:.3f} of full precision"
    if "steps_per_sync" not in told:
        return text
    return f"{text}; a sync every {told['steps_per_sync']:.3g} steps, {told['seconds_per_sync']:.3g} s"


def _bottleneck(of_ranks: np.ndarray) -> tuple[str, int | None]:
    """Returns the bottleneck and its rank.

    Args:
        of_ranks: The shares of each rank. Communication includes the wait for slower peers, so its minimum over the
            ranks counts.
    """
    computing, communication, waiting, callbacks = of_ranks[:, :4].T
    found = {
        "communication": (communication.min(), None),
        "input": (waiting.max(), int(np.argmax(waiting))),
        "callbacks": (callbacks.max(), int(np.argmax(callbacks))),
        "computing": (computing.max() - computing.min(), int(np.argmax(computing))),
    }
    what = max(found, key=lambda name: found[name][0])
    return what, found[what][1]
