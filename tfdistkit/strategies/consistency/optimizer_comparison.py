"""Compares an optimizer between the ranks when it is built: its options, and how its gradients travel; and its weights.

Where they differ, weights drift apart without an error; and where an optimizer compresses its momentum after some steps
(`OneBitAdam`), ranks that begin at different steps wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.cluster.rendezvous.protocol import printable
from tfdistkit.communication.reducer import Reducer
from tfdistkit.errors import OptionError, explain
from tfdistkit.strategies.consistency import choice_comparison, training_comparison
from tfdistkit.strategies.consistency.data_comparison import compared, is_compared

# Most ranks that an error names.
_MOST_NAMED = 16


class AgreedOptimizers:
    """A mixin that compares the optimizers of a strategy of several processes."""

    def check_optimizer(self, optimizer: Any) -> None:
        """Compares the options of an optimizer with those on the other ranks; all of them call it.

        Args:
            optimizer: A Keras optimizer that is about to be built, which takes collectives of its own.

        Raises:
            OptionError: on all ranks, if an option differs.
        """
        everyone = _everyone(self, lambda: options_of(optimizer))
        if everyone is not None:
            require_same(everyone)

    def check_choices(self, reducer: Reducer, variables: list[Any]) -> None:
        """Compares how the gradient of each variable travels; all ranks call it before an optimizer is built.

        Args:
            reducer: The reducer of the gradients.
            variables: The variables of the optimizer.

        Raises:
            OptionError: on all ranks, if they would send the gradient of a variable in other ways.
        """
        everyone = _everyone(self, lambda: choice_comparison.choices_of(reducer, variables))
        if everyone is not None:
            paths = _everyone(self, lambda: choice_comparison.paths_of(variables), always=True) or []
            chosen = [[choice_comparison.Choice(*one) for one in of_rank] for of_rank in everyone]
            choice_comparison.require_same(chosen, paths)

    def check_weights(self, weights: list[Any]) -> None:
        """Compares weights with those on the other ranks; all of them call it before a loop's first update.

        Args:
            weights: The variables of an optimizer.

        Raises:
            DivergenceError: on all ranks, if they differ.
        """
        strategy: Any = self
        if not is_compared(strategy) or not strategy.has_equal_weights():
            return
        everyone = _everyone(strategy, lambda: training_comparison.samples_of(weights))
        if everyone is not None:
            training_comparison.require_equal_samples(everyone)


def options_of(optimizer: Any) -> dict[str, Any]:
    """Returns the options of an optimizer that are numbers, texts, or made of them, such as schedules.

    Args:
        optimizer: A Keras optimizer. A learning rate that is a number is left out, because it is a variable: scripts
            set it on one rank, `BroadcastVariables` makes it equal, and each epoch compares it (`training_comparison`).
    """
    try:
        config = dict(optimizer.get_config())
    except (NotImplementedError, TypeError, ValueError):  # An optimizer of the user's own, which is never saved.
        config = {}
    config.pop("name", None)  # Keras numbers the names in each process.
    if isinstance(config.get("learning_rate"), float):
        del config["learning_rate"]
    plain = {name: value for name, value in config.items() if _is_plain(value)}
    return {"optimizer": type(optimizer).__name__, **plain}


def require_same(everyone: list[dict[str, Any]]) -> None:
    """Requires the options of an optimizer to be the same on all ranks.

    Args:
        everyone: Those of each rank, in rank order.

    Raises:
        OptionError: for the first that differs, with the values of all ranks.
    """
    for name in dict.fromkeys(["optimizer", *(name for one in everyone for name in one)]):
        given = [one.get(name) for one in everyone]
        if any(value != given[0] for value in given):
            of_ranks = (f"rank {rank}: {printable(repr(value))}" for rank, value in enumerate(given[:_MOST_NAMED]))
            what = "The optimizer" if name == "optimizer" else f"`{name}` of the optimizer {everyone[0]['optimizer']}"
            raise OptionError(
                explain(
                    f"{what} must be the same on all ranks.",
                    received="; ".join(of_ranks),
                    do="Give it the same value on every rank: a number that does not depend on the rank, on files of "
                    "one host, or on random numbers.",
                )
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(one) for one in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _in_replica(strategy: Any) -> bool:
    return not tf.distribute.in_cross_replica_context() and tf.distribute.get_strategy() is strategy


def _everyone(strategy: Any, own_facts: Callable[[], Any], always: bool = False) -> list[Any] | None:
    """Returns the facts of all ranks if they differ, or with `always`; else None, as where there are no other ranks.

    Args:
        strategy: The strategy.
        own_facts: Returns the facts of this rank, which may read variables.
        always: Whether to return them even if they are equal.
    """
    here = len(strategy.extended.worker_devices)
    if strategy.num_replicas_in_sync == here or (here > 1 and _in_replica(strategy)):
        return None
    with tf.init_scope():  # A step may be traced now, which builds its optimizer.
        return _compared_outside(strategy, own_facts(), always)


def _compared_outside(strategy: Any, facts: Any, always: bool) -> list[Any] | None:
    """Compares facts outside of replicas, also where an eager step builds its optimizer."""
    if not _in_replica(strategy):
        return compared(strategy, facts, always)
    found: list[Any] = []

    @tf.autograph.experimental.do_not_convert
    def compare(_: Any) -> None:
        found.append(compared(strategy, facts, always))

    tf.distribute.get_replica_context().merge_call(compare)
    everyone: list[Any] | None = found[0]
    return everyone
