"""A case of the case table. It names no strategy, and loads neither Keras nor TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call to make after Keras is imported: of a name in `models`, or else in `keras`."""

    path: str
    args: tuple[Any, ...]
    options: dict[str, Any]


def by(path: str, *args: Any, **options: Any) -> Call:
    """Records a call."""
    return Call(path, args, options)


@dataclass(frozen=True)
class Case:
    """A training whose results on several replicas must equal those of one process.

    Args:
        name: Its name in the tests.
        model: Makes the model.
        optimizer: Makes the optimizer.
        data: A kind of data (`data.KINDS`).
        rows: Rows of data; 100 of 32 leave a last batch of 4.
        global_batch: Rows of a batch.
        loss: As in `compile`.
        metrics: As in `compile`.
        feed: How the data comes: a name in `feeds.FEEDS`.
        weights: "sample" or "class" for weights of samples or of classes.
        compile: More options of `compile`.
        fit: More options of `fit`.
        validation: How validation data comes ("dataset", "arrays"), or None.
        run: Who trains: the name of a function in `runs.RUNS`.
        policy: The dtype policy.
        tolerance: How far losses and weights may be from those of one process, relative.
        reason: Why the tolerance is not 1e-6. docs/exactness.md repeats it.
        exact: False where one process cannot be matched by definition (dropout).
        seed_of_its_own: Whether rank r seeds with the seed of the case plus r.
    """

    name: str
    model: Call = by("mlp")
    optimizer: Call = by("optimizers.Adam", 0.01)
    data: str = "numbers"
    rows: int = 100
    global_batch: int = 32
    loss: Any = "mse"
    metrics: Any = ("mae",)
    feed: str = "dataset"
    weights: str | None = None
    compile: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    validation: str | None = None
    run: str = "fit"
    policy: str = "float32"
    tolerance: float = 1e-6
    reason: str = ""
    exact: bool = True
    seed_of_its_own: bool = False
