"""A Keras program as plain data: model, data and training. It is sent to processes, shrunk, printed and saved."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Program:
    """One program. The default of each field is its simplest value; shrinking goes towards it.

    Args:
        inputs: What a row is (`feeding.INPUTS`).
        targets: What a row's target is (`feeding.TARGETS`).
        rows: Rows of data.
        batch: Rows of a global batch.
        feed: How the data reaches `fit` (`feeding.FEEDS`).
        distributed: Whether the user distributes the dataset before `fit`.
        weights: "", or which weights come with the rows: "rows", "zeros" (some are 0), "classes", "tokens", "outputs".
        style: "sequential", "functional" or "subclassed".
        encoder: What makes a vector, or a sequence of vectors, of a row (`networks.ENCODERS`).
        body: The layers behind it (`networks.BODY`).
        step: Who computes the loss and the gradients (`training_steps.STEPS`); "keras" for a plain `compile`.
        numbers: The numbers that the loss is the sum of (`number_losses.PARTS`), with the steps and losses of them.
        change: What such a step does to gradients (`number_losses.CHANGES`); "" for nothing.
        state: The state of such a step (`stateful_steps.STATES`); "" for none.
        update: How the step writes it (`stateful_steps.UPDATES`).
        use: What its loss does with it (`stateful_steps.USES`).
        effect: What the step does beside (`stateful_steps.EFFECTS`).
        way: The order of its writes, or how it applies gradients (`stateful_steps.WAYS`).
        loss: A loss (`objectives.LOSSES`); "" without any.
        reduction: As Keras's losses take it; "" for their default.
        loss_weights: Whether the outputs' losses have weights.
        metrics: Names of metrics (`objectives.METRICS`).
        weighted_metrics: Whether they are `weighted_metrics`.
        optimizer: A name in `objectives.OPTIMIZERS`.
        clip: "", "clipnorm", "global_clipnorm" or "clipvalue".
        accumulation: `gradient_accumulation_steps`; 0 for none.
        ema: "", "ema", or "overwrite" for an average that overwrites the weights.
        schedule: Whether the learning rate follows a schedule.
        loss_scale: Whether a `LossScaleOptimizer` is around the optimizer.
        execution: `steps_per_execution`.
        eager: `run_eagerly`.
        epochs: Epochs of a `fit`.
        steps_per_epoch: As in `fit`; 0 for none.
        validation: "", "arrays", "dataset", "split".
        callbacks: Names of callbacks (`callback_list.CALLBACKS`).
        acts: What is done with the model (`running.ACTS`), in this order.
        interrupt: The first `fit` is interrupted after so many steps, and resumed by `BackupAndResume`; 0 for never.
        save_every: Steps between two backups.
        seed: Of everything.
    """

    inputs: str = "numbers"
    targets: str = "number"
    rows: int = 8
    batch: int = 4
    feed: str = "arrays"
    distributed: bool = False
    weights: str = ""
    style: str = "sequential"
    encoder: str = "none"
    body: tuple[str, ...] = ()
    step: str = "keras"
    numbers: tuple[str, ...] = ()
    change: str = ""
    state: str = ""
    update: str = ""
    use: str = ""
    effect: str = ""
    way: str = ""
    loss: str = "mse"
    reduction: str = ""
    loss_weights: bool = False
    metrics: tuple[str, ...] = ()
    weighted_metrics: bool = False
    optimizer: str = "sgd"
    clip: str = ""
    accumulation: int = 0
    ema: str = ""
    schedule: bool = False
    loss_scale: bool = False
    execution: int = 1
    eager: bool = False
    epochs: int = 1
    steps_per_epoch: int = 0
    validation: str = ""
    callbacks: tuple[str, ...] = ()
    acts: tuple[str, ...] = ("fit",)
    interrupt: int = 0
    save_every: int = 1
    seed: int = 1

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that differ from the simplest program."""
        fields = dataclasses.asdict(self)
        simplest = dataclasses.asdict(Program())
        changed = {name: value for name, value in fields.items() if value != simplest[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Program:
        """Reads the output of `to_json`."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def changed(self, **fields: Any) -> Program:
        """Returns the program with other values of some fields."""
        return dataclasses.replace(self, **fields)

    def key(self) -> str:
        """Returns a short unique name."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def __str__(self) -> str:
        return f"Program({', '.join(f'{name}={value!r}' for name, value in self.to_json().items())})"
