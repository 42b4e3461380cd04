"""`Hierarchical`: the ranks of a host sum gradients in every step, and the hosts average weights now and then."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tfdistkit.communication.algorithms import rounds
from tfdistkit.communication.algorithms.async_average import AsyncModelAverage
from tfdistkit.communication.algorithms.decentralized import Decentralized
from tfdistkit.communication.algorithms.diloco import DiLoCo
from tfdistkit.communication.algorithms.local_sgd import LocalSGD, _Round
from tfdistkit.communication.reducer import MakeState, Reducer, Wire, times
from tfdistkit.communication.sums import BF16, FP16
from tfdistkit.errors import OptionError, UnsupportedError, explain


class Hierarchical(Reducer):
    """Trains the workers of each host synchronously, and lets the hosts talk as another algorithm says.

    In every step the workers of a host sum their gradients, weighted by rows, through its memory: they have the same
    weights, bit for bit. The hosts are to `across` what workers are to `LocalSGD` alone: their weights are averaged
    every few steps, weighted by the rows of each host, and only one worker of each host sends.

    It needs the strategy `multiworker` on CPUs of several hosts. With `across=LocalSGD(1)` and plain SGD it is
    synchronous training.

    Args:
        inside: What gradients travel as within a host: a name, or an object of `tfdistkit.compression`. Default: as
            they are.
        across: When the hosts talk: `LocalSGD`, or `DiLoCo` without a compression or with `FP16` or `BF16`. Default:
            `LocalSGD(50)`.

    Raises:
        OptionError: (a ValueError) if an argument is wrong.
        UnsupportedError: (a RuntimeError) if `inside` has a momentum or clipping of its own; in the first step, as
            `LocalSGD`.

    Example:
        ```python
        strategy = tfdistkit.strategy("multiworker", algorithm=Hierarchical(across=LocalSGD(every=100)))
        ```
    """

    needs_processes = True
    needs_hosts = True
    is_local = True

    def __init__(self, inside: Any = None, across: LocalSGD | None = None):
        self.inside = rounds.required_compression(inside, type(self).__name__, "inside")
        _require_no_momentum(self.inside)
        self.across = _required(LocalSGD(50) if across is None else across)
        self._optimizer: Any = None
        # By optimizer: what `inside` keeps that is equal within a host, and not on all.
        self._of_host: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def describe(self) -> str:
        inside = None if self.inside is None else self.inside.describe()
        return f"{type(self).__name__}(inside={inside}, across={self.across.describe()})"

    def choices(self, variables: list[Any]) -> list[str]:
        return rounds.choices_of(self.describe(), self.inside, variables)

    def check_optimizer(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.across.check_optimizer(optimizer)
        if self.inside is not None:
            self.inside.check_optimizer(optimizer)

    def build(self, variables: list[Any], make_state: MakeState) -> list[Any] | None:
        if not variables:
            return None
        kept: list[Any] = []
        of_host = self._of_host.setdefault(self._optimizer, [])

        def make(variable: Any, name: str, *args: Any, **options: Any) -> Any:
            kept.append(make_state(variable, name, *args, **options))
            if not options.get("of_replica"):
                of_host.append(kept[-1])
            return kept[-1]

        inside = rounds.build_compression(self.inside, variables, make)
        rows = make_state(variables[0], "host_rows", shape=(), dtype="float32", of_replica=True)
        made: _Round = (self.across.build(variables, make_state) or [])[0]
        made.apart += kept
        return [_OfVariable(made, state, rows) for state in inside]

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        own: _OfVariable = state[0]
        self.across.begin_round(own.of_all)
        host = wire.within_host()
        # A part is the gradient of the mean over this replica's rows; in a step that is not local times its share.
        weights = [wire.rows, wire.rows if wire.is_local_step else wire.share]
        weights = tf.stack([tf.cast(one, tf.float64) for one in weights])
        [of_host] = host.sum([weights])
        own.rows.assign(tf.cast(of_host[0], tf.float32))
        host.rows, host.share = wire.rows, tf.math.divide_no_nan(weights[1], of_host[1])
        factor = host.share if wire.is_local_step else tf.math.divide_no_nan(tf.ones([], tf.float64), of_host[1])

        def of_rows_of_host() -> list[Any]:
            parts = [times(gradient, factor) for gradient in gradients]
            if self.inside is None or host.replicas == 1:
                return host.sum(parts)
            return self.inside.reduce(parts, variables, [one.inside for one in state], host)

        return self.across.after_warmup(own.of_all, gradients, wire, of_rows_of_host)

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        own: _OfVariable = state[0]
        hosts = wire.across_hosts()
        hosts.rows, hosts.is_local_step = tf.convert_to_tensor(own.rows), wire.is_local_step
        hosts.on_average = wire.on_average
        self.across.after_apply(variables, [one.of_all for one in state], hosts)

    def trains_alone(self) -> bool:
        return self.across.trains_alone()

    def own_slots(self, optimizer: Any) -> list[Any]:
        return [*self.across.own_slots(optimizer), *self._of_host.get(optimizer, [])]

    def unsettled(self) -> list[Any]:
        return self.across.unsettled()

    def settle(self, what: Any, wire: Wire) -> None:
        self.across.settle(what, wire.across_hosts())


class _OfVariable(NamedTuple):
    """The state of a variable.

    Args:
        of_all: What `across` made, the same for all variables.
        inside: What `inside` made.
        rows: The rows of this host in the step, the same for all variables.
    """

    of_all: _Round
    inside: Any
    rows: Any


def _required(across: Any) -> LocalSGD:
    is_one = isinstance(across, LocalSGD) and not isinstance(across, (Decentralized, AsyncModelAverage))
    if not is_one:
        raise OptionError(
            explain(
                "`across` must be a `LocalSGD` or a `DiLoCo`: it averages the weights of the hosts.",
                received=f"across={across.describe() if isinstance(across, Reducer) else repr(across)}",
                expected="tfdistkit.algorithms.LocalSGD(every=50), say",
            )
        )
    compression = across.compression if isinstance(across, DiLoCo) else None
    if compression is not None and type(compression) not in (FP16, BF16):
        raise OptionError(
            explain(
                "`across` must send sums: one worker of each host sends, which other compressions do not know.",
                received=f"across={across.describe()}",
                expected='DiLoCo(..., compression=None), or "fp16" or "bf16"',
            )
        )
    checked: LocalSGD = across
    return checked


def _require_no_momentum(inside: Reducer | None) -> None:
    if inside is not None and inside.replaces_optimizer:
        raise UnsupportedError(
            explain(
                "`inside` must have no momentum and no clipping: a host with one worker would miss them.",
                received=f"inside={inside.describe()}",
                do="Leave `momentum` and `clip_norm` out of the compression; give them to the optimizer.",
            )
        )
