"""Compares, between the ranks, how the gradient of each variable travels.

Predicates of the user choose that (`tfdistkit.compression.Where`). Where ranks choose differently, they run different
collectives, which wait for each other or sum other numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfdistkit.cluster.rendezvous.protocol import printable
from tfdistkit.communication.reducer import Reducer
from tfdistkit.errors import OptionError, explain


class Choice(NamedTuple):
    """What the ranks compare of a variable: not its name, in which Keras counts the layers of a process.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        reducer: What the reducer does with its gradient (`Reducer.choices`).
    """

    shape: list[int | None]
    dtype: str
    reducer: str


def choices_of(reducer: Reducer, variables: list[Any]) -> list[Choice]:
    """Returns how the gradients of variables travel.

    Args:
        reducer: The reducer of the gradients.
        variables: The variables of an optimizer, in its order.
    """
    described = reducer.choices(variables)
    return [Choice(tf.TensorShape(variable.shape).as_list(), tf.as_dtype(variable.dtype).name, text)
            for variable, text in zip(variables, described)]  # fmt: skip


def paths_of(variables: list[Any]) -> list[str]:
    """Returns the paths of variables, for an error."""
    return [str(getattr(variable, "path", variable.name)) for variable in variables]


def require_same(everyone: list[list[Choice]], paths: list[list[str]]) -> None:
    """Requires the gradients of all variables to travel alike on all ranks.

    Args:
        everyone: The choices of each rank, in rank order.
        paths: The paths of the same variables.

    Raises:
        OptionError: for the first variable that differs, with the choices of two ranks.
    """
    first = everyone[0]
    for rank, own in enumerate(everyone):
        if len(own) != len(first):
            raise _other_variables(f"{len(first)} variables on rank 0; {len(own)} variables on rank {rank}")
    for number, choice in enumerate(first):
        for rank, own in enumerate(everyone):
            other, names = own[number], (paths[0][number], paths[rank][number])
            if other[:2] != choice[:2]:
                shown = (_shown(choice, names[0]), _shown(other, names[1]))
                raise _other_variables(f"variable {number}: {shown[0]} on rank 0; {shown[1]} on rank {rank}")
            if other.reducer != choice.reducer:
                sent = (_sent(choice, names[0]), _sent(other, names[1]))
                raise _other_choice(f"variable {number}: {sent[0]} on rank 0; {sent[1]} on rank {rank}")


def _other_choice(received: str) -> OptionError:
    return OptionError(
        explain(
            "All ranks must send the gradient of a variable in the same way.",
            received=received,
            expected="the same compression on all ranks",
            do="Let the predicate of `Where` choose by what is equal on all ranks, such as `variable.shape`: not by "
            "the rank, the environment or random numbers. If it looks at `variable.path`, name the layers: Keras "
            "counts unnamed ones in each process (`dense`, `dense_1`).",
        )
    )


def _other_variables(received: str) -> OptionError:
    return OptionError(
        explain(
            "The optimizer must update the same variables on all ranks, in the same order.",
            received=received,
            do="Make the same model on every rank, and pass its variables in one order: not that of a set, say.",
        )
    )


def _sent(choice: Choice, path: str) -> str:
    return f"{_shown(choice, path)}, by {printable(choice.reducer)}"


def _shown(choice: Choice, path: str) -> str:
    return f"`{printable(path)}` of shape {tuple(choice.shape)} and {choice.dtype}"
