"""`Where` and `Chain`: compressions for each variable, and two compressions in sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tfdistkit.communication.reducer import MakeState, Reducer, Wire, require_reducer
from tfdistkit.communication.sums import Average
from tfdistkit.errors import OptionError, UnsupportedError, explain


class Where(Reducer):
    """Chooses a compression for each variable.

    Args:
        predicate: Called once with each Keras variable; returns whether `then` compresses it. It must return the same
            on all ranks, which compare what it chose when an optimizer is built.
        then: Compresses the gradients of these variables.
        otherwise: Compresses the gradients of the other variables. Default: no compression.

    Raises:
        OptionError: (a ValueError) if an argument is not a compression, or `predicate` is not callable; when the
            optimizer is built, if `predicate` chose otherwise on another rank.

    Example:
        ```python
        compression = Where(lambda variable: "embedding" in variable.path, FP16(), PowerSGD(rank=4))
        ```
    """

    def __init__(self, predicate: Callable[[Any], bool], then: Reducer, otherwise: Reducer | None = None):
        if not callable(predicate):
            raise OptionError(
                explain("`predicate` must be a function of a variable.", received=f"predicate={predicate!r}")
            )
        self.predicate = predicate
        self._parts = (_required(then), _required(otherwise or Average()))
        # By `id`, because Keras variables have no hash: each variable, and what the predicate chose for it.
        self._chosen: dict[int, tuple[weakref.ref[Any], bool]] = {}

    @property
    def needs_processes(self) -> bool:  # type: ignore[override]
        return any(part.needs_processes for part in self._parts)

    @property
    def replaces_optimizer(self) -> bool:  # type: ignore[override]
        return any(part.replaces_optimizer for part in self._parts)

    @property
    def has_state(self) -> bool:
        return any(part.has_state for part in self._parts)

    def describe(self) -> str:
        return f"Where({', '.join(part.describe() for part in self._parts)})"

    def check_optimizer(self, optimizer: Any) -> None:
        for part in self._parts:
            part.check_optimizer(optimizer)

    def _divided(self, variables: list[Any]) -> list[tuple[Reducer, list[int]]]:
        chosen = [self._is_chosen(variable) for variable in variables]
        places = [[i for i, one in enumerate(chosen) if one is wanted] for wanted in (True, False)]
        return [(part, of_part) for part, of_part in zip(self._parts, places) if of_part]

    def _is_chosen(self, variable: Any) -> bool:
        """Calls the predicate once for each variable: a later answer would not fit the state that `build` made."""
        known = self._chosen.get(id(variable))
        if known is None or known[0]() is not variable:
            known = self._chosen[id(variable)] = weakref.ref(variable), bool(self.predicate(variable))
        return known[1]

    def choices(self, variables: list[Any]) -> list[str]:
        chosen = [""] * len(variables)
        for part, places in self._divided(variables):
            for i, choice in zip(places, part.choices([variables[i] for i in places])):
                chosen[i] = choice
        return chosen

    def build(self, variables: list[Any], make_state: MakeState) -> list[Any] | None:
        states: list[Any] = [None] * len(variables)
        for part, places in self._divided(variables):
            made = part.build([variables[i] for i in places], make_state)
            for i, state in zip(places, made or [None] * len(places)):
                states[i] = state
        return states

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        if gradients and not variables:
            raise UnsupportedError(
                explain(
                    "`Where` cannot be used with `tfdistkit.global_gradients`, which does not know the variables.",
                    received="gradients without their variables",
                    do="Pass gradients to `optimizer.apply` as they are, or choose one compression for all variables.",
                )
            )
        results = list(gradients)
        for part, places in self._divided(variables):
            own, of_variables, states = ([given[i] for i in places] for given in (gradients, variables, state))
            for i, result in zip(places, part.reduce(own, of_variables, states, wire)):
                results[i] = result
        return results

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        for part, places in self._divided(variables):
            part.after_apply([variables[i] for i in places], [state[i] for i in places], wire)


class Chain(Reducer):
    """Compresses the sums of another compression: `Chain(PowerSGD(4), FP16())` sends its matrices as float16.

    Args:
        first: Compresses the gradients.
        then: Compresses the tensors that `first` sums; must keep no state. Bytes and indices of `first` are unchanged.

    Raises:
        OptionError: (a ValueError) if an argument is not a compression, or `then` keeps state.
    """

    def __init__(self, first: Reducer, then: Reducer):
        self.first, self.then = _required(first), _required(then)
        if then.has_state:
            raise OptionError(
                explain(
                    "The second compression of a `Chain` must keep no state.",
                    received=then.describe(),
                    expected="FP16(), BF16(), ByteGrad() or Int8()",
                )
            )

    @property
    def needs_processes(self) -> bool:  # type: ignore[override]
        return self.first.needs_processes or self.then.needs_processes

    @property
    def replaces_optimizer(self) -> bool:  # type: ignore[override]
        return self.first.replaces_optimizer

    @property
    def has_state(self) -> bool:
        return self.first.has_state

    def describe(self) -> str:
        return f"Chain({self.first.describe()}, {self.then.describe()})"

    def check_optimizer(self, optimizer: Any) -> None:
        self.first.check_optimizer(optimizer)

    def choices(self, variables: list[Any]) -> list[str]:
        return [f"Chain({choice}, {self.then.describe()})" for choice in self.first.choices(variables)]

    def build(self, variables: list[Any], make_state: MakeState) -> list[Any] | None:
        return self.first.build(variables, make_state)

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        return self.first.reduce(gradients, variables, state, _Through(wire, self.then))

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        self.first.after_apply(variables, state, _Through(wire, self.then))


class _Through(Wire):
    """A wire whose sums are those of a reducer.

    Args:
        wire: The wire of that reducer.
        reducer: A reducer without state.
    """

    def __init__(self, wire: Wire, reducer: Reducer):
        super().__init__(wire.replicas, wire.replica_id, self._sum)
        self._wire, self._reducer = wire, reducer
        self.gather, self.exchange, self.adasum = wire.gather, wire.exchange, wire.adasum  # type: ignore[method-assign]

    def _sum(self, tensors: list[Any]) -> list[Any]:
        return self._reducer.reduce(tensors, [], [None] * len(tensors), self._wire)


def _required(reducer: Any) -> Reducer:
    if reducer is None:
        raise OptionError(explain("A compression is missing.", received="None", expected="FP16(), say"))
    require_reducer(reducer)
    checked: Reducer = reducer
    if checked.is_local:
        raise OptionError(
            explain(
                "An algorithm cannot be a part of a compression: it averages weights, and sends no gradients.",
                received=checked.describe(),
                do="Pass it alone: algorithm=...",
            )
        )
    return checked
