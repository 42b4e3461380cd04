"""Errors and warnings for a step that does not change what one process would change."""

from __future__ import annotations

from typing import Any

import keras

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.step_check.trial_steps import name_of


def other_gradient(model: Any, variable: Any, size: float, branch: bool | None = None) -> UnsupportedError:
    """Returns the error for a gradient that is not the one of one process.

    Args:
        model: The model.
        variable: The variable that it is of.
        size: By how much it differs, relative.
        branch: The branch that all conditions of the user's took; None for the one that the rows chose.
    """
    replicas, rename = model.distribute_strategy.num_replicas_in_sync, _own_calls(model)
    where, choose = _of_branch(branch)
    return UnsupportedError(
        explain(
            f"The train step of {model.name!r} must have the gradients of one process, and on {replicas} "
            "replicas it has others: it combines rows of the batch in a way that cannot be computed from the rows of "
            "each replica.",
            received=f"a gradient of `{name_of(variable)}` that differs by {size:.2g} of its norm, on some rows of the "
            f"first batch{where}",
            expected="a loss that is computed from losses of each row, and from sums, means and extremes of them",
            do=f"{rename}{choose}Where the step clips or changes gradients, take "
            "`tfdistkit.global_gradients(gradients)` first. Where the loss combines rows, compute it in `call(self, "
            "y_true, y_pred)` of a subclass of `keras.losses.Loss`, which gets the "
            "rows of all replicas; or gather what rows are compared with, or what a state that the step reads again "
            "is computed from: `tfdistkit.collectives.all_gather(x)`. Where it takes the gradient of a mean loss by "
            "the inputs, which depends on the number of rows, take that of the sum of the losses. If it does none of "
            "this, look for a constant that is another number on each rank. To train on the rows of each replica as "
            "they are: `tfdistkit.strategy(..., check_step=False)`.",
        )
    )


def _own_calls(model: Any) -> str:
    """Returns what to do about losses whose class has another `__call__` than Keras's, which gathers the rows."""
    losses = keras.tree.flatten(private_api.compile_arguments(model).get("loss"))
    own = [one for one in losses if isinstance(one, keras.losses.Loss) and _has_own_call(type(one))]
    names = ", ".join(dict.fromkeys(type(one).__name__ for one in own))
    return f"Rename `__call__` of {names} to `call`, without `sample_weight`. " if own else ""


def _has_own_call(kind: type) -> bool:
    return not private_api.is_of_keras(next(one for one in kind.__mro__ if "__call__" in vars(one)))


def _of_branch(branch: bool | None) -> tuple[str, str]:
    """Returns which branch the conditions of the user took, and what to do about it."""
    if branch is None:
        return "", ""
    where = f", where conditions (`tf.cond`, `if`) are {branch}"
    return where, "Choose values, not branches: `tf.where(condition, a, b)`. "


def other_state(model: Any, variable: Any, size: float, branch: bool | None = None) -> UnsupportedError:
    """Returns the error for state that is not the one of one process.

    Args:
        model: The model.
        variable: The variable that holds it.
        size: By how much it differs, relative.
        branch: As of `other_gradient`.
    """
    replicas = model.distribute_strategy.num_replicas_in_sync
    where, choose = _of_branch(branch)
    return UnsupportedError(
        explain(
            f"The train step of {model.name!r} must write the state of one process, and on {replicas} replicas "
            "it writes another: it combines rows of the batch in a way that cannot be computed from the rows of each "
            "replica.",
            received=f"a change of `{name_of(variable)}` that differs by {size:.2g} of its norm, on some rows of the "
            f"first batch{where}",
            expected="state that is computed from sums, means and extremes over rows",
            do=f"{choose}Gather the rows first: `rows = tfdistkit.collectives.all_gather(rows)`; or, if it is computed "
            "from gradients, take `tfdistkit.global_gradients(gradients)`. To keep the mean of what each replica "
            "computes from its own rows: `tfdistkit.strategy(..., check_step=False)`.",
        )
    )


def other_log(model: Any, name: str, size: float, branch: bool | None = None) -> str:
    """Returns the warning of a value in the logs that is not the one of one process.

    Args:
        model: The model.
        name: Its name in the logs.
        size: By how much it differs, relative.
        branch: As of `other_gradient`.
    """
    where, choose = _of_branch(branch)
    return explain(
        f"{name!r} in the logs of {model.name!r} should be that of one process. It combines what each replica computes "
        "from its own rows. The gradients are those of one process on the rows that were compared.",
        received=f"a value that differs by {size:.2g} of itself, on some rows of the first batch{where}",
        expected="a value that is computed from sums, means and extremes over rows",
        do=f"{choose}Gather the rows first: `rows = tfdistkit.collectives.all_gather(rows)`; for the norm of "
        "gradients, take `tfdistkit.global_gradients(gradients)`. Without this warning: "
        "`tfdistkit.strategy(..., check_step=False)`.",
    )
