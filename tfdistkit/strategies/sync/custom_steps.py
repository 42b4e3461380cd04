"""Steps of the user's own: `global_gradients` in those of `fit`, and loops that forget `strategy.run`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdistkit import env
from tfdistkit.collectives import registry
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.data_dependence import Ancestry

# Operations of graphs that sum over processes, by the beginning of their names.
_SUMS = ("Horovod", "Collective", "NcclAllReduce")


def global_gradients(gradients: Any) -> Any:
    """Returns the gradients of the global batch inside a `train_step`, before `optimizer.apply`.

    Needed only where a step ascends along gradients (SAM), or clips them, takes their norm or their sign where its
    graph cannot be read, as in eager steps. `optimizer.apply` averages other gradients by itself, and does not average
    these again.

    Args:
        gradients: The result of `tape.gradient` on this replica: a list of tensors, IndexedSlices and None, or a
            structure of them.

    Returns:
        Their mean over the replicas, weighted by rows, the same on all replicas, in the same structure; `gradients` in
        one process.

    Raises:
        UnsupportedError: in `strategy.run` outside of a Keras step, where the user divides losses; if the reducer of
            the strategy has state.

    Example:
        ```python
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(tfdistkit.global_gradients(gradients), 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        ```
    """
    step = steps.current()
    structure = list(gradients) if isinstance(gradients, (tuple, Iterator)) else gradients
    if step is None:
        return structure
    if not step.in_keras_step:
        raise UnsupportedError(
            explain(
                "`tfdistkit.global_gradients` must be called in a Keras step (`fit`, `train_on_batch`).",
                received="a call in a function that `strategy.run` runs",
                do='In your own loop, sum them: tf.distribute.get_replica_context().all_reduce("SUM", gradients), and '
                "after your change divide them by strategy.num_replicas_in_sync: `apply` sums once more.",
            )
        )
    flat = tf.nest.flatten(structure)
    present = [i for i, g in enumerate(flat) if g is not None]
    parts = step.without_empty(step.weighted([flat[i] for i in present]))
    strategy: Any = tf.distribute.get_strategy()
    for i, gradient in zip(present, strategy.sum_gradients(parts, [], None) if parts else []):
        flat[i] = gradient
        for values in tf.nest.flatten(gradient, expand_composites=True):
            steps.note_same_on_all(step.replicas, values)  # Its graph tells that for some transports only.
    return tf.nest.pack_sequence_as(structure, flat)


def require_run(process: str, line: str, gradients: Any) -> None:
    """Checks `apply` outside of `strategy.run`, where no gradients are summed, in one of several processes.

    Args:
        process: Which one it is.
        line: The line of `apply`.
        gradients: What the optimizer applies.

    Raises:
        UnsupportedError: if the step did not sum its gradients by itself.
    """
    flat = [one for one in tf.nest.flatten(gradients, expand_composites=True) if tf.is_symbolic_tensor(one)]
    comes_from_sums = Ancestry(lambda one: one.op.type.startswith(_SUMS)).includes
    if registry.sums.were_called() or any(map(comes_from_sums, flat)):
        return
    raise UnsupportedError(
        explain(
            f"`apply` of an optimizer must be called in `strategy.run`, or nothing is summed over the processes: "
            f"{process} would train its copy of the model alone.",
            received=f"`apply` at {line}, outside of `strategy.run`",
            expected="strategy.run(step, args=(batch,)) for the batches of strategy.distribute_batches(dataset)",
            do="Let `strategy.run` call the function that computes and applies the gradients. If it sums them over the "
            f"processes by itself, or each process shall train its own model, set {env.OWN_MODELS}=1.",
        )
    )
