"""`Decentralized`: every worker averages its weights with its peers, in place of the gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.algorithms import rounds
from tfdistkit.communication.algorithms.local_sgd import LocalSGD, _Round
from tfdistkit.communication.algorithms.peers import Parcel, average_pair, can_travel, partner_of
from tfdistkit.communication.reducer import MakeState, Reducer, Wire
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_choice, require_integer


class Decentralized(LocalSGD):
    """Updates each worker by its own gradient, and averages its weights with its peers afterwards.

    With `"all"` the workers are equal after each average. With `"shift_one"` each talks to one other worker, another
    one in each round, so that a worker sends its weights once, however many workers there are: the workers differ, and
    what one learns reaches the others in a few rounds (as in Bagua, https://tutorials.baguasys.com/algorithms/).
    Averages are weighted by rows. As with `LocalSGD`, all variables are averaged over all workers at the end of an
    epoch, before `evaluate` and `predict`, and before a backup or a checkpoint. Only then do the variables of the
    optimizer travel.

    Args:
        peers: `"all"`, or `"shift_one"`. With an odd number of workers, one rests in each round.
        every: Steps between two averages.
        compression: The compression of the changes of the weights: a name, or an object of `tfdistkit.compression`;
            with `"shift_one"` one of `FP16`, `BF16`, `ByteGrad` and `Int8`. Default: the weights as they are.

    Raises:
        OptionError: (a ValueError) if an argument is out of range.
        UnsupportedError: (a RuntimeError) as `LocalSGD`.
    """

    def __init__(self, peers: str = "all", every: int = 1, compression: Any = None):
        super().__init__(require_integer("every", every))
        self.peers = require_choice("peers", peers, ("all", "shift_one"))
        self.compression = rounds.required_compression(compression, type(self).__name__)
        rounds.require_no_optimizer(self.compression, type(self).__name__)
        if peers == "shift_one" and self.compression is not None and not can_travel(self.compression):
            raise _needs_all(self.compression)

    def describe(self) -> str:
        compression = None if self.compression is None else self.compression.describe()
        return f"{type(self).__name__}(peers={self.peers!r}, every={self.every}, compression={compression})"

    def choices(self, variables: list[Any]) -> list[str]:
        return rounds.choices_of(self.describe(), self.compression, variables)

    def build_outer(self, variables: list[Any], make_state: MakeState) -> list[Any]:
        # Since the last average: the rows since all variables were averaged are in `rows`.
        fresh = make_state(variables[0], "local_fresh", shape=(), dtype="float32", of_replica=True)
        if self.compression is None:
            return [fresh, [], []]
        anchors = [make_state(variable, "local_anchor", saved=False) for variable in variables]
        summed_as = self.compression if self.peers == "all" else None
        return [fresh, anchors, rounds.build_compression(summed_as, variables, make_state)]

    def begin_round(self, current: _Round) -> None:
        # Here, not after the average: the user may have loaded other weights since.
        is_first = tf.equal(current.steps, 0)
        for variable, anchor in zip(current.variables, current.outer[1]):
            anchor.assign(tf.where(is_first, tf.convert_to_tensor(variable), tf.convert_to_tensor(anchor)))

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        current: _Round = state[0]
        fresh = current.outer[0]
        steps, rows = rounds.count_step(current, wire)
        fresh.assign(fresh + rows)
        talk = self._with_all if self.peers == "all" else self._with_one
        tf.cond(tf.equal(steps % self.every, 0), lambda: talk(current, wire), lambda: False)

    def settle(self, what: Any, wire: Wire) -> None:
        current: _Round = what
        if self.peers == "all":
            tf.cond(tf.equal(current.steps % self.every, 0), lambda: False, lambda: self._with_all(current, wire))
        else:
            self._with_all(current, wire, current.rows)
        rounds.average_slots(current, current.slots(), wire)
        current.outer[0].assign(tf.zeros([], tf.float32))

    def _with_all(self, current: _Round, wire: Wire, rows: Any = None) -> bool:
        fresh, anchors, states = current.outer
        rows = tf.convert_to_tensor(fresh if rows is None else rows)
        values = [tf.convert_to_tensor(variable) for variable in current.variables]
        if self.compression is None or self.peers != "all":
            *sums, total = wire.sum([*(rounds.times_rows(value, rows) for value in values), rows])
            averages = [rounds.mean_over_rows(s, total, value) for s, value in zip(sums, values)]
        else:
            [total] = wire.sum([rows])
            share = rounds.share_of(rows, total)
            begins = [tf.convert_to_tensor(anchor) for anchor in anchors]
            parts = [(v - begin) * tf.cast(share, v.dtype) for v, begin in zip(values, begins)]
            sums = rounds.sum_parts(self.compression, parts, current.variables, states, wire)
            averages = [begin + s for begin, s in zip(begins, sums)]
        for variable, value, average in zip(current.variables, values, averages):
            variable.assign(tf.where(total > 0, average, value))
        for variable, anchor in zip(current.variables, anchors):
            anchor.assign(tf.convert_to_tensor(variable))
        fresh.assign(tf.zeros([], tf.float32))
        return True

    def _with_one(self, current: _Round, wire: Wire) -> bool:
        values = [tf.convert_to_tensor(variable) for variable in current.variables]
        anchors = [tf.convert_to_tensor(anchor) for anchor in current.outer[1]]
        partner = partner_of(current.total // self.every, wire.replica_id, wire.replicas)
        parcel = Parcel(values, self.compression)
        new = average_pair(values, anchors, tf.convert_to_tensor(current.rows), partner, parcel, wire)
        for variable, average in zip(current.variables, new):
            variable.assign(average)
        return True


def _needs_all(compression: Reducer) -> OptionError:
    return OptionError(
        explain(
            '`compression` must be one that two workers can use alone with `peers="shift_one"`.',
            received=f"compression={compression.describe()}",
            expected="FP16(), BF16(), ByteGrad() or Int8()",
            do='Use peers="all" with what is kept for later rounds (TopK, PowerSGD, Sign).',
        )
    )
