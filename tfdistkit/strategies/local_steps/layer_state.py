"""The state of layers in local steps: each replica writes its own, and it is averaged when the weights are."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import tensorflow as tf

from tfdistkit.communication.algorithms import rounds
from tfdistkit.communication.reducer import Wire
from tfdistkit.strategies.sync import step as steps


class LocalLayerState:
    """The state that the layers of a model write in local steps (BatchNormalization's moving statistics).

    It is averaged at the end of a step in which an optimizer averaged its weights, not in that average itself: a train
    step may write state and apply gradients several times (a GAN), with other rows since the last average each.

    Args:
        strategy: The strategy of the model.
    """

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._states: list[Any] = []
        # Written by each replica for itself: the rows and steps since the last average, whether there was one now.
        with strategy.scope():
            made = functools.partial(tf.Variable, trainable=False, name="tfdistkit_local_steps")
            self._rows, self._steps, self._is_due = made(0.0), made(0), made(0)

    def weights_were_averaged(self) -> None:
        """Called in a replica when an optimizer of the model has averaged its weights."""
        self._is_due.assign(1)

    def end_step(self, step: steps.ReplicaStep) -> None:
        """Ends a local step: averages the state if weights were averaged in it.

        Args:
            step: The step of this replica.
        """
        new = [one for one in step.layer_state if not any(one is known for known in self._states)]
        self._states += new
        step.layer_state = []
        if not self._states:
            return
        self._rows.assign_add(1.0 if step.rows is None else step.rows)
        self._steps.assign_add(1)
        with step.summing():
            wire = self._strategy.wire()
            if step.traffic is not None:
                wire = step.traffic.counted(wire, step, is_sync=False)
            tf.cond(tf.convert_to_tensor(self._is_due) > 0, lambda: self.average(wire), lambda: False)

    def __len__(self) -> int:
        return len(self._states)

    def __bool__(self) -> bool:
        return True

    @property
    def is_own(self) -> bool:
        """Whether the state may differ between replicas now; called outside of replicas, the same on all."""
        return bool(self._states) and int(self._steps.numpy()) > 0

    def average(self, wire: Wire) -> bool:
        """Gives all replicas the mean of the state, weighted by the rows since the last one; called in each replica.

        Args:
            wire: The collectives.
        """
        rows = tf.convert_to_tensor(self._rows)
        local = [tf.convert_to_tensor(one) for one in self._states]
        *sums, all_rows = wire.sum([*(rounds.times_rows(value, rows) for value in local), rows])
        for state, value, total in zip(self._states, local, sums):
            state.write_local(rounds.mean_over_rows(total, all_rows, value))
        self._rows.assign(0.0)
        for counter in (self._steps, self._is_due):
            counter.assign(0)
        return True


# By strategy, by model.
_OF: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, LocalLayerState]] = weakref.WeakKeyDictionary()


def of_model(model: Any) -> LocalLayerState:
    """Returns the local state of a model's layers; called outside of replicas before its first local step.

    Args:
        model: The model.
    """
    strategy = model.distribute_strategy
    of_models = _OF.setdefault(strategy, weakref.WeakKeyDictionary())
    if model not in of_models:
        of_models[model] = LocalLayerState(strategy)
    return of_models[model]


def unsettled(strategy: Any) -> list[LocalLayerState]:
    """Returns the state whose values may differ between replicas now; called outside of replicas.

    Args:
        strategy: A strategy.
    """
    return [one for one in _OF.get(strategy, {}).values() if one.is_own]
