"""`horovod`: synchronous training of one model by several processes that communicate over Horovod."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistkit.cluster.rendezvous.validation import require_same_options, version_difference
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.collectives import horovod_transport as transport
from tfdistkit.collectives.horovod_transport import hvd
from tfdistkit.communication import Adasum, Average, Reducer, Sum
from tfdistkit.communication.buckets import FUSION_BYTES
from tfdistkit.communication.horovod_wire import HorovodWire
from tfdistkit.communication.named import chosen_reducer, require_others
from tfdistkit.communication.reducer import needs_hosts
from tfdistkit.communication.sums import densify
from tfdistkit.errors import ClusterConfigError, OptionError, TooLateError, UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.report.hangs import notes
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.consistency.optimizer_comparison import AgreedOptimizers
from tfdistkit.strategies.consistency.shuffling import AgreedShuffling, set_seed_of_job
from tfdistkit.strategies.consistency.versions import facts
from tfdistkit.strategies.contract import KerasStrategyMixin
from tfdistkit.strategies.devices import take_gpu_of_local_rank
from tfdistkit.strategies.horovod.options import OPS, require_ranks, set_variables
from tfdistkit.strategies.horovod.rendezvous import run_rendezvous
from tfdistkit.strategies.sync.replica import ReplicaMixin
from tfdistkit.strategies.sync.transports.own_transport import KnowsItsTask, OwnTransport
from tfdistkit.validation import require_bool, require_choice

# The process sets that Horovod was initialised with, by their ranks.
_process_sets: dict[tuple[int, ...], Any] = {}


class ProcessSetTransport:
    """Horovod's operations between the ranks of a process set.

    Args:
        process_set: The Horovod process set.
    """

    def __init__(self, process_set: Any):
        self._process_set = process_set
        self.size, self.rank = process_set.size(), process_set.rank()

    def all_reduce(self, tensors: Sequence[Any], reduce_op: Any) -> list[Any]:
        """Sums or averages tensors, dense or IndexedSlices, over the ranks."""
        return transport.all_reduce(list(tensors), reduce_op, self._process_set)

    def all_gather(self, tensor: Any, axis: int = 0) -> tf.Tensor:
        """Concatenates the tensors of all ranks in rank order; their lengths along the axis may differ."""
        return transport.all_gather(tensor, axis, self._process_set)

    def broadcast(self, tensor: Any) -> tf.Tensor:
        """Returns the tensor of rank 0."""
        # Horovod's root rank is a rank of the whole job, also in a process set.
        return transport.broadcast(tensor, (self._process_set.ranks or [0])[0], self._process_set)


class HorovodExtended(ReplicaMixin, OwnTransport, private_api.CollectiveAllReduceExtended):
    """Runs the replica of this process, and communicates with its peers."""


class HorovodStrategy(
    KnowsItsTask, AgreedShuffling, AgreedOptimizers, KerasStrategyMixin, tf.distribute.MultiWorkerMirroredStrategy
):
    """A strategy whose replicas communicate over Horovod.

    It is a `MultiWorkerMirroredStrategy` because Keras tests for that class by name where it merges the logs of
    several workers, and gathers their predictions.

    Args:
        reducer: What turns the gradients of the ranks into those of the global batch.
        sparse_as_dense: Whether IndexedSlices are sent as dense tensors.
        process_set: The Horovod process set of the ranks that train together.

    Attributes:
        fusion_bytes: The most bytes of gradients of one operation; Horovod waits for all tensors of an operation.
    """

    fusion_bytes = FUSION_BYTES

    def __init__(self, reducer: Reducer, sparse_as_dense: bool, process_set: Any):
        self.reducer, self.sparse_as_dense, self.process_set = reducer, sparse_as_dense, process_set
        self.transport = ProcessSetTransport(process_set)
        alone = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        options = tf.distribute.experimental.CommunicationOptions()
        extended = HorovodExtended(self, cluster_resolver=alone, communication_options=options)
        tf.distribute.Strategy.__init__(self, extended)

    def wire(self) -> HorovodWire:
        wire = HorovodWire(self.process_set)
        # No small first bucket: an operation more takes a cycle of Horovod's thread, 2 ms of a step of 25 ms, and
        # what is sent sooner gained nothing, also where gradients have 100 MB.
        wire.fusion_bytes = wire.first_bytes = self.fusion_bytes
        return wire

    def sum_gradients(self, gradients: list[Any], variables: list[Any], optimizer: Any) -> list[Any]:
        return super().sum_gradients(densify(gradients) if self.sparse_as_dense else gradients, variables, optimizer)


def build(
    cluster: ClusterSpec,
    *,
    op: str = "average",
    compression: str | Reducer = "none",
    algorithm: Reducer | None = None,
    sparse_as_dense: bool = False,
    reducer: Reducer | None = None,
    process_set: list[int] | list[list[int]] | None = None,
    fusion_threshold_bytes: int | None = None,
    cycle_time_ms: float | None = None,
    hierarchical: bool | None = None,
    timeline: str | None = None,
    autotune: bool | None = None,
    timeout_s: float | None = None,
    check_data: bool = True,
    check_step: bool = True,
) -> HorovodStrategy:
    """Makes the strategy `horovod`.

    Args:
        cluster: Which process this is, as far as the launcher set it.
        op: `"average"` (exact: the gradient of the global batch), `"sum"` (the average times the number of ranks), or
            `"adasum"` (needs MPI and a power of two of ranks).
        compression: What gradients travel as: `"none"`, `"fp16"`, `"bf16"`, or one of `tfdistkit.compression`.
        algorithm: When the ranks talk, one of `tfdistkit.algorithms`. Default: in every step.
        sparse_as_dense: Whether the gradients of embeddings are sent as dense tensors.
        reducer: What reduces the gradients in place of `op` and `compression` (`tfdistkit.communication.Reducer`).
        process_set: The ranks that train together, or several lists of ranks, of which the one with this rank
            is used. Every rank of the job gives the same lists. Default: all ranks.
        fusion_threshold_bytes: Size of Horovod's fusion buffer, in bytes (HOROVOD_FUSION_THRESHOLD).
        cycle_time_ms: Milliseconds between two of Horovod's coordination cycles (HOROVOD_CYCLE_TIME).
        hierarchical: Whether to reduce within hosts first (HOROVOD_HIERARCHICAL_ALLREDUCE).
        timeline: A file for Horovod's timeline (HOROVOD_TIMELINE).
        autotune: Whether Horovod tunes itself (HOROVOD_AUTOTUNE).
        timeout_s: Gloo's timeout for a peer, in seconds (HOROVOD_GLOO_TIMEOUT_SECONDS).
        check_data: Whether the ranks compare their data, and what they train, in `fit`, `evaluate`, `predict`,
            `tfdistkit.data.shard` and loops.
        check_step: Whether the first step of code of your own is compared with one process.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy` with one replica for each rank.

    Raises:
        OptionError: if an option is wrong.
        MissingDependencyError: if Horovod is not installed.
        RendezvousError: if a rank is missing from the rendezvous.
        ClusterConfigError: if Horovod has fewer ranks than the launcher started, or versions differ.
        TooLateError: if Horovod is already initialised and options that it reads then are given.
        UnsupportedError: if this rank is in no process set, or `adasum` cannot work here.
    """
    require_choice("op", op, OPS)
    require_bool("sparse_as_dense", sparse_as_dense)
    require_bool("check_data", check_data)
    require_bool("check_step", check_step)
    _require_a_combination(op, compression, reducer, algorithm)
    lists = None if process_set is None else require_ranks(process_set, cluster.world_size)
    set_variables(
        is_initialized=hvd.is_initialized(),
        is_chief=cluster.is_chief,
        fuses=not transport.order_matters(cluster.world_size),
        fusion_threshold_bytes=fusion_threshold_bytes,
        cycle_time_ms=cycle_time_ms,
        hierarchical=hierarchical,
        timeline=timeline,
        autotune=autotune,
        timeout_s=timeout_s,
    )
    run_rendezvous(cluster)
    chosen = _join(lists, cluster.world_size)
    keras_patches.install()
    chosen_by_options = _reducer(op, compression, reducer, algorithm)
    _require_all_ranks(cluster, chosen_by_options)
    if chosen.size() == 1:
        require_others(chosen_by_options)
    if op == "adasum":
        _require_adasum(chosen)
    take_gpu_of_local_rank(cluster)
    strategy = HorovodStrategy(chosen_by_options, sparse_as_dense, chosen)
    strategy.join(cluster)
    strategy.check_data, strategy.check_step = check_data, check_step
    if private_api.global_seed() is None:
        # Without a seed of the user, all ranks still need one shuffle order.
        set_seed_of_job(int(transport.broadcast(tf.constant(int(facts()["seed"]), tf.int64))))
    return strategy


def _require_a_combination(
    op: str, compression: str | Reducer, reducer: Reducer | None, algorithm: Reducer | None
) -> None:
    if op != "average" and algorithm is not None:
        raise OptionError(
            explain('`op` must be "average" with `algorithm`, which averages weights.', received=f"op={op!r}")
        )
    if op == "adasum" and compression not in ("none", "fp16"):
        raise OptionError(
            explain(
                '`compression` must be "none" or "fp16" with `op="adasum"`: Horovod\'s Adasum has no bfloat16 '
                "and no other compression.",
                received=f"op={op!r}, compression={compression!r}",
            )
        )
    if reducer is not None and (op, compression) != ("average", "none"):
        raise OptionError(
            explain(
                "`reducer` must not be given together with `op` or `compression`.",
                received=f"op={op!r}, compression={compression!r}, reducer={reducer!r}",
            )
        )
    chosen = chosen_reducer(compression, reducer, algorithm)
    if chosen is not None and chosen.needs_hosts:
        raise needs_hosts(f"{chosen.describe()} for the strategy 'horovod'")


def _reducer(op: str, compression: str | Reducer, given: Reducer | None, algorithm: Reducer | None) -> Reducer:
    if op == "adasum":
        return Adasum(tf.float16 if compression == "fp16" else None)
    reducer = chosen_reducer(compression, given, algorithm) or Average()
    return Sum(reducer) if op == "sum" else reducer


def _join(lists: list[list[int]] | None, world_size: int) -> Any:
    """Initialises Horovod and returns the process set of this rank."""
    is_first = not hvd.is_initialized()
    if lists is None or lists == [list(range(world_size))]:
        if is_first:
            with notes.noting_polling():
                hvd.init()
        return hvd.global_process_set
    if is_first:
        _process_sets.update({tuple(ranks): hvd.ProcessSet(ranks) for ranks in lists})
        with notes.noting_polling():
            hvd.init(process_sets=list(_process_sets.values()))
        atexit.register(_end_together)
    elif any(tuple(ranks) not in _process_sets for ranks in lists):
        raise TooLateError(
            explain(
                "Process sets must be given before Horovod is initialised.",
                received=f"process_set={lists!r} after `hvd.init()`",
                do="Give `process_set` to the first `tfdistkit.strategy` of the process, and remove `hvd.init()`.",
            )
        )
    for ranks in lists:
        if hvd.rank() in ranks:
            return _process_sets[tuple(ranks)]
    raise UnsupportedError(
        explain(
            f"`process_set` must hold this rank, {hvd.rank()}, in one of its lists.",
            received=f"process_set={lists!r}",
            do="Make the strategy only on the ranks that train, or add a list with the other ranks.",
        )
    )


def _end_together() -> None:
    """Waits for the ranks of the other process sets: Horovod shuts down on all ranks when the first one ends."""
    if getattr(sys, "last_type", None) is None:  # Do not wait after an exception.
        transport.all_reduce([tf.zeros([])], tf.distribute.ReduceOp.SUM)


def _require_all_ranks(cluster: ClusterSpec, reducer: Reducer) -> None:
    """Checks that Horovod has all processes of the job, and that they run the same versions with the same reducer."""
    if cluster.world_size != hvd.size():
        raise ClusterConfigError(
            explain(
                "Horovod must have as many ranks as the job has processes.",
                received=f"{cluster.world_size} processes in {cluster.source}, {hvd.size()} ranks of Horovod",
                do="Start it with `tfdistkit run --backend horovod`, `horovodrun` or `mpirun`.",
            )
        )
    everyone = hvd.allgather_object({**facts(), "reducer": reducer.describe()})
    difference = version_difference(everyone)
    if difference is not None:
        raise difference
    require_same_options(everyone, ("reducer",))


def _require_adasum(process_set: Any) -> None:
    size = hvd.size()
    if not hvd.mpi_enabled() or size & (size - 1) or process_set is not hvd.global_process_set:
        raise UnsupportedError(
            explain(
                '`op="adasum"` needs MPI, and 2, 4, 8, ... ranks without a process set.',
                received=f"{size} ranks, over {'MPI' if hvd.mpi_enabled() else 'Gloo'}",
                do='Start the job with `tfdistkit run --backend mpi`, or use `op="average"`.',
            )
        )
