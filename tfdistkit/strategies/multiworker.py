"""`multiworker`: synchronous training of one model by several processes."""

from __future__ import annotations

import collections
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdistkit import env
from tfdistkit.cluster.environments.mpi_addresses import exchange_addresses
from tfdistkit.cluster.own_address import check_own_address
from tfdistkit.cluster.rendezvous.exchange import DEFAULT_TIMEOUT_S, exchange_facts
from tfdistkit.cluster.spec import TRAINING_ROLES, ClusterSpec
from tfdistkit.collectives.carriers import carriers_for
from tfdistkit.collectives.shm.transport import SharedMemoryTransport
from tfdistkit.communication import Average, Reducer, Wire
from tfdistkit.communication.buckets import FUSION_BYTES
from tfdistkit.communication.named import chosen_reducer, require_others
from tfdistkit.communication.reducer import needs_hosts
from tfdistkit.errors import ClusterConfigError, OptionError, RendezvousError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.consistency.optimizer_comparison import AgreedOptimizers
from tfdistkit.strategies.consistency.shuffling import AgreedShuffling, set_seed_of_job
from tfdistkit.strategies.consistency.versions import facts
from tfdistkit.strategies.contract import KerasStrategyMixin
from tfdistkit.strategies.devices import require_not_started, take_gpu_of_local_rank
from tfdistkit.strategies.sync import collective_keys, collective_timeout
from tfdistkit.strategies.sync.gradients import trial
from tfdistkit.strategies.sync.gradients.wires import HostsWire, RingWire, SharedMemoryWire
from tfdistkit.strategies.sync.replica import ReplicaMixin
from tfdistkit.strategies.sync.transports import shared_host
from tfdistkit.strategies.sync.transports.hierarchical import HierarchicalSums
from tfdistkit.strategies.sync.transports.own_transport import KnowsItsTask, OwnTransport, naming_variable
from tfdistkit.validation import require_bool, require_choice, require_integer, require_positive

_COMMUNICATION = ("auto", "shm", "hierarchical", "ring", "nccl")

# Dtypes that TensorFlow's broadcast cannot send, and the dtype that carries each.
_SENT_AS = carriers_for(lambda dtype: dtype != tf.bool)


# Eager sums of a shape before a function is traced for it. Tracing takes longer than a few eager sums, each of which
# starts a thread pool in TensorFlow.
_SUMS_BEFORE_FUNCTION = 3


class MultiWorkerExtended(ReplicaMixin, private_api.CollectiveAllReduceExtended):
    """Runs the replica of this process, and communicates with its peers."""

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        reduce = super()._reduce_to
        local = self._container_strategy().experimental_local_results(value)
        is_dense = len(local) == 1 and isinstance(local[0], (tf.Tensor, tf.Variable))
        is_plain = is_dense and isinstance(destinations, str)  # The cached function would keep a variable alive.
        if not tf.executing_eagerly() or self._num_workers == 1 or not is_plain or private_api.is_mirrored(value):
            return reduce(reduce_op, value, destinations, options)
        tensor = tf.convert_to_tensor(local[0])
        # All ranks make the same calls, so they trace at the same call.
        calls = self.__dict__.setdefault("_calls_of_sums", collections.Counter())
        key = (str(reduce_op), tensor.dtype, tuple(tensor.shape), destinations, str(options and vars(options)))
        calls[key] += 1
        if calls[key] <= _SUMS_BEFORE_FUNCTION:
            return reduce(reduce_op, tensor, destinations, options)
        functions = self.__dict__.setdefault("_functions_of_sums", {})
        if key not in functions:
            functions[key] = tf.function(
                lambda one: reduce(reduce_op, one, destinations, options), autograph=False
            ).get_concrete_function(tensor)
        return functions[key](tensor)

    def _get_variable_creator_initial_value(self, replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        send = super()._get_variable_creator_initial_value
        if replica_id != 0 or self._num_workers == 1:
            return send(replica_id=replica_id, device=device, primary_var=primary_var, **kwargs)

        def value_of_rank_0() -> Any:
            with tf.device(device):
                value = private_api.initial_value(kwargs["initial_value"])
                value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            if value.shape.num_elements() == 0:
                return value  # TensorFlow crashes when it broadcasts an empty tensor.
            carrier = _SENT_AS.get(value.dtype, value.dtype)
            carried = {**kwargs, "initial_value": tf.cast(value, carrier), "dtype": carrier}
            with naming_variable(kwargs.get("name"), value):
                received = send(replica_id=replica_id, device=device, primary_var=primary_var, **carried)()
            return tf.cast(received, value.dtype)

        return value_of_rank_0

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        reduce, flat = super()._replica_ctx_all_reduce, tf.nest.flatten(value)
        sums = self._container_strategy().hierarchical_sums
        # A trial step leaves out sums that its results do not need. TensorFlow would run them on the first rank of each
        # host alone, before a sum over the hosts.
        large = [] if sums is None or trial.is_tracing() else sums.takes(flat)
        if not large:
            return reduce(reduce_op, value, options)
        results = dict(zip(large, sums.all_reduce([flat[i] for i in large], reduce_op)))
        small = [i for i in range(len(flat)) if i not in results]
        if small:
            results.update(zip(small, reduce(reduce_op, [flat[i] for i in small], options)))
        return tf.nest.pack_sequence_as(value, [results[i] for i in range(len(flat))])


class SharedMemoryExtended(ReplicaMixin, OwnTransport, private_api.CollectiveAllReduceExtended):
    """Runs the replica of this process, and communicates with its peers through the memory of their host."""


class MultiWorkerStrategy(
    KnowsItsTask, AgreedShuffling, AgreedOptimizers, KerasStrategyMixin, tf.distribute.MultiWorkerMirroredStrategy
):
    """A `tf.distribute.MultiWorkerMirroredStrategy` that is exact under Keras 3."""

    _collective_key_base = collective_keys.BASE_OF_PROCESSES  # TensorFlow reads it from the strategy.

    # What sums large tensors of ranks on several hosts, of which some share one.
    hierarchical_sums: HierarchicalSums | None = None
    fusion_bytes = FUSION_BYTES

    def __init__(self, resolver: Any, communication_options: Any, transport: SharedMemoryTransport | None = None):
        self.transport = transport
        extended = MultiWorkerExtended if transport is None else SharedMemoryExtended
        options = {"cluster_resolver": resolver, "communication_options": communication_options}
        tf.distribute.Strategy.__init__(self, extended(self, **options))

    def wire(self) -> Wire:
        wire = self._wire_of_transport()
        wire.fusion_bytes = self.fusion_bytes
        return wire

    def _wire_of_transport(self) -> Wire:
        if self.transport is not None:
            return SharedMemoryWire(self.transport)
        if len(self.extended.worker_devices) > 1:
            return super().wire()  # Several GPUs are several replicas, which TensorFlow's collectives join.
        return RingWire(self) if self.hierarchical_sums is None else HostsWire(self, self.hierarchical_sums)


def build(
    cluster: ClusterSpec,
    *,
    communication: str = "auto",
    compression: str | Reducer = "none",
    algorithm: Reducer | None = None,
    reducer: Reducer | None = None,
    fusion_bytes: int = FUSION_BYTES,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    check_data: bool = True,
    check_step: bool = True,
) -> MultiWorkerStrategy:
    """Makes the strategy `multiworker`. A single worker does not wait.

    The rendezvous of the workers takes place before TensorFlow starts: an error on every worker names, within
    `timeout_s`, each rank that is missing, runs other versions or received another cluster.

    Args:
        cluster: Which process this is, and the addresses of all.
        communication: `"shm"` (CPUs, through the memory of the host that all workers are on), `"hierarchical"` (CPUs,
            through the memory of each host, then over gRPC between one worker of each), `"ring"` (CPUs and GPUs, over
            gRPC) or `"nccl"` (GPUs). `"auto"`: without GPUs the first of these that is possible, `"hierarchical"` where
            several workers share a host; with GPUs what TensorFlow chooses. The same on all workers.
        compression: What gradients travel as: `"none"`, `"fp16"`, `"bf16"`, or one of `tfdistkit.compression`. The
            same on all workers.
        algorithm: When the workers talk, one of `tfdistkit.algorithms`. Default: in every step. The same on all
            workers.
        reducer: What turns the gradients of the workers into those of the global batch, in place of `compression`
            (`tfdistkit.communication.Reducer`). Default: their sum. The same on all workers.
        fusion_bytes: The most bytes of gradients that travel together, while the backward pass computes the others. The
            same on all workers.
        timeout_s: Seconds that a worker waits for its peers: at the rendezvous, and in every collective. A worker
            that does longer work alone (an evaluation on the chief, say) needs a larger one.
        check_data: Whether the workers compare their data, and what they train, in `fit`, `evaluate`, `predict`,
            `tfdistkit.data.shard` and loops.
        check_step: Whether the first step of code of your own is compared with one process.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy` with one replica for each worker process; for each
        GPU of a worker process that has a host to itself.

    Raises:
        OptionError: if an option is wrong.
        ClusterConfigError: if this process cannot bind its address, if the workers' clusters or versions differ, or if
            the workers are not on the hosts that `communication` needs.
        TooLateError: if TensorFlow has already initialized its devices.
        RendezvousError: if a worker is missing after `timeout_s`.
        UnsupportedError: if there are fewer GPUs than workers on this host.
    """
    options: Any = {"communication": communication, "timeout_s": timeout_s, "fusion_bytes": fusion_bytes}
    options |= {"check_data": check_data, "check_step": check_step}
    reducers: Any = {"compression": compression, "algorithm": algorithm, "reducer": reducer}
    return build_as(MultiWorkerStrategy, cluster, **reducers, **options)


def build_as(
    strategy_class: type[MultiWorkerStrategy],
    cluster: ClusterSpec,
    *,
    communication: str = "auto",
    compression: str | Reducer = "none",
    algorithm: Reducer | None = None,
    reducer: Reducer | None = None,
    fusion_bytes: int = FUSION_BYTES,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    check_data: bool = True,
    check_step: bool = True,
) -> MultiWorkerStrategy:
    """Makes a variant of the strategy `multiworker`, as `build` makes the strategy itself.

    Args:
        strategy_class: A subclass of `MultiWorkerStrategy`, which overrides hooks of `strategies.contract`.
        cluster: As for `build`, and so are the other arguments and the errors.
        communication: See `build`.
        compression: See `build`.
        algorithm: See `build`.
        reducer: See `build`.
        fusion_bytes: See `build`.
        timeout_s: See `build`.
        check_data: See `build`.
        check_step: See `build`.
    """
    name = _communication(communication)
    options = _communication_options(name, timeout_s)
    require_bool("check_data", check_data)
    require_bool("check_step", check_step)
    require_integer("fusion_bytes", fusion_bytes)
    reducer = chosen_reducer(compression, reducer, algorithm) or Average()
    _require_memory_of_hosts(reducer, name)
    if not cluster.is_training or cluster.world_size == 1:
        require_others(reducer)
        keras_patches.install()
        alone = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        strategy = strategy_class(alone, options)
        strategy.require_own_processes(reducer)
        strategy.reducer = reducer
        return strategy
    cluster = exchange_addresses(cluster, timeout_s)
    _require_addresses(cluster)
    require_not_started(f"rank {cluster.rank} of {cluster.world_size}")
    keras_patches.install()
    check_own_address(cluster)
    offer = shared_host.offer(name, reducer.describe(), fusion_bytes, reducer.needs_hosts)
    try:
        rendezvous = exchange_facts(cluster, {**facts(), **offer.facts}, timeout_s)
    except BaseException:
        offer.close()
        raise
    take_gpu_of_local_rank(cluster)
    shared = shared_host.share(offer, cluster, rendezvous.facts, timeout_s)
    strategy = _joined(strategy_class, cluster, options, timeout_s, shared)
    strategy.require_own_processes(reducer)
    strategy.check_data, strategy.check_step = check_data, check_step
    strategy.reducer, strategy.fusion_bytes = reducer, fusion_bytes
    if private_api.global_seed() is None:
        # Without a seed of the user, all ranks still need one shuffle order.
        set_seed_of_job(int(rendezvous.facts[0]["seed"]))
    return strategy


def _joined(
    strategy_class: type[MultiWorkerStrategy],
    cluster: ClusterSpec,
    options: Any,
    timeout_s: float,
    shared: shared_host.Shared | None,
) -> MultiWorkerStrategy:
    """Makes the strategy over what the ranks share: the memory of one host, of several hosts, or none."""
    if shared is not None and len(shared.hosts) == 1:
        alone = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        strategy = strategy_class(alone, options, shared.transport)
        strategy.join(cluster)
        return strategy
    strategy = _start(strategy_class, cluster, options, timeout_s)
    collective_timeout.start(options.timeout_seconds)
    if shared is not None:
        sums = HierarchicalSums(shared.transport, cluster.rank, shared.hosts, timeout_s)
        sums.start(strategy)
        strategy.hierarchical_sums = sums
    return strategy


def _require_addresses(cluster: ClusterSpec) -> None:
    if not cluster.has_addresses:
        raise ClusterConfigError(
            explain(
                "The strategy 'multiworker' needs the addresses of all workers.",
                received=f"rank {cluster.rank} of {cluster.world_size}, from {cluster.source}, without addresses",
                expected="TF_CONFIG, or PMIx, which Open MPI's mpirun and `srun --mpi=pmix` serve",
                do='Use tfdistkit.strategy("horovod"), or start the workers with `tfdistkit run`.',
            )
        )


def _start(
    strategy_class: type[MultiWorkerStrategy], cluster: ClusterSpec, options: Any, timeout_s: float
) -> MultiWorkerStrategy:
    """Starts TensorFlow's server of this process, and connects it to its peers."""
    spec = tf.train.ClusterSpec({r: list(cluster.addresses[r]) for r in TRAINING_ROLES if r in cluster.addresses})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec,
        task_type=cluster.task.role,
        task_id=cluster.task.index,
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
        rpc_layer="grpc",
    )
    private_api.configure_coordination(spec, timeout_s)
    try:
        with _own_sigterm():
            return strategy_class(resolver, options)
    except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError, tf.errors.InternalError) as error:
        raise RendezvousError(
            explain(
                f"Rank {cluster.rank} completed the rendezvous, but TensorFlow could not connect to its peers.",
                received=str(error).splitlines()[0],
                expected="every worker to be reachable from every other at its address",
                do=f"Look for a firewall between these addresses: {', '.join(cluster.workers)}.",
            )
        ) from error


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps the handler of SIGTERM, which TensorFlow's coordination service replaces while it starts.

    Its handler only notes the signal for who asks the service (`SigtermNotifier` in preemption_notifier.cc). So the
    process would not end by SIGTERM, neither before `fit` nor in one without `BackupAndResume`. A signal that comes
    while the service starts, in a second or less, is lost: then the launcher kills the process when its time is over.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, TypeError):  # not the main thread, or a handler of C code
            signal.signal(signal.SIGTERM, handler)


def _require_memory_of_hosts(reducer: Reducer, communication: str) -> None:
    """Refuses a reducer that treats hosts and their ranks differently where the ranks of a host cannot be known."""
    has_gpus = bool(tf.config.list_physical_devices("GPU"))
    if reducer.needs_hosts and (communication not in ("auto", "hierarchical") or has_gpus):
        gpus = f", {len(tf.config.list_physical_devices('GPU'))} GPUs" if has_gpus else ""
        raise needs_hosts(f"communication={communication!r}{gpus}")


def _communication(given: str) -> str:
    """Returns the option `communication`; where it is "auto", what the environment says."""
    name = require_choice("communication", str(given).lower(), _COMMUNICATION)
    wished = env.text(env.COMMUNICATION)
    return require_choice(env.COMMUNICATION, wished.lower(), _COMMUNICATION) if name == "auto" and wished else name


def _communication_options(name: str, timeout_s: float) -> Any:
    timeout_s = require_positive("timeout_s", timeout_s, "seconds")
    has_gpus = bool(tf.config.list_physical_devices("GPU"))
    if name == "nccl" and not has_gpus:
        raise OptionError(
            explain(
                '`communication` must be "auto", "shm", "hierarchical" or "ring" where TensorFlow finds no GPUs.',
                received=f"communication={name!r}",
            )
        )
    if name == "hierarchical" and has_gpus:
        raise OptionError(
            explain(
                '`communication="hierarchical"` must have no GPUs: it sums in the memory of the hosts.',
                received=f"{len(tf.config.list_physical_devices('GPU'))} GPUs",
                do='Use communication="auto", or hide the GPUs: CUDA_VISIBLE_DEVICES=-1.',
            )
        )
    kinds = tf.distribute.experimental.CommunicationImplementation
    return tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=timeout_s, implementation=kinds[name.upper()] if name in ("ring", "nccl") else kinds.AUTO
    )
