"""`parameter_server`: variables on servers, steps on workers that do not wait for each other, one coordinator."""

from __future__ import annotations

import atexit
import time
from typing import Any

import tensorflow as tf

from tfdistkit import env
from tfdistkit.cluster.liveness import Sign, Watch, wait_for
from tfdistkit.cluster.own_address import check_own_address
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, OptionError, RendezvousError, UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.report.broken_exit import leave_at_once
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.contract import KerasStrategyMixin
from tfdistkit.strategies.devices import require_not_started
from tfdistkit.strategies.parameter_server import atomic_updates
from tfdistkit.strategies.parameter_server.profiling import CoordinatedClock
from tfdistkit.strategies.parameter_server.scheduler import CoordinatedFunction
from tfdistkit.strategies.parameter_server.server import dismiss, serve
from tfdistkit.strategies.parameter_server.worker_datasets import WorkerDataset, made_by_worker
from tfdistkit.strategies.sync.replica import ReplicaMixin

# As for `multiworker`: long enough for a scheduler that starts hosts one after the other.
_TIMEOUT_S = 300.0
# Seconds without a sign of life after which a task is given up. TensorFlow waits for ever.
_HEARTBEAT_TIMEOUT_S = 20.0
# Enough that a worker never waits for the coordinator, few enough that a lost worker holds little.
_INFLIGHT_PER_WORKER = 4
# Seconds between two looks at whether the steps of a run that failed have ended.
_IDLE_POLL_EVERY_S = 0.005


class ParameterServerExtended(ReplicaMixin, private_api.ParameterServerStrategyV2Extended):
    """What runs a step on a worker. No merge_call: accumulation and EMA stand in branches (keras#20582)."""

    def _run_inline(self, fn: Any, args: tuple, kwargs: dict) -> Any:
        with atomic_updates.running():
            return super()._run_inline(fn, args, kwargs)


class ParameterServerStrategy(KerasStrategyMixin, tf.distribute.ParameterServerStrategy):
    """`tf.distribute.ParameterServerStrategy` that works with Keras 3, and loses no update.

    Args:
        cluster: The addresses of all tasks.
        max_inflight_per_worker: How many steps may be on their way for each worker.
        heartbeat_timeout_s: Seconds without a sign of life after which a task is given up.
    """

    def __init__(self, cluster: ClusterSpec, max_inflight_per_worker: int, heartbeat_timeout_s: float):
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({role: list(addresses) for role, addresses in cluster.addresses.items()}),
            task_type="chief",
            task_id=0,
            rpc_layer="grpc",
        )
        super().__init__(resolver)
        private_api.use_extended(self, ParameterServerExtended)
        private_api.wait_for_own_operations_only()  # For loops of the user's own; `fit` may run in another thread.
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self)
        self.num_workers = len(cluster.addresses["worker"])
        self.max_inflight = max_inflight_per_worker * self.num_workers
        # The function of `fit` or `evaluate` that has steps on their way.
        self.unfinished: CoordinatedFunction | None = None
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._addresses = _task_addresses(cluster)
        self._watch = Watch(self._addresses)
        atexit.register(self._end_the_others)

    def _end_the_others(self) -> None:
        """When this process ends: they have nobody to serve any more."""
        private_api.leave_functions()
        alive = [name.split() for name in self._addresses if self._watch.sign(name) is Sign.ALIVE]
        dismiss(f"/job:{role}/replica:0/task:{index}" for role, index in alive)
        if len(alive) < len(self._addresses):
            leave_at_once()

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Makes one input pipeline on each worker; `fit`, `evaluate` and `predict` take it.

        Args:
            dataset_fn: `dataset_fn(input_context) -> tf.data.Dataset` of batches of `input_context`'s pipeline.
            options: `tf.distribute.InputOptions`; not used, as in TensorFlow.

        Returns:
            A `tf.distribute.DistributedDataset`.
        """
        if tf.inside_function():  # ClusterCoordinator.create_per_worker_dataset, in a loop of the user's own.
            return super().distribute_datasets_from_function(made_by_worker(dataset_fn), options)
        return WorkerDataset(self, dataset_fn)

    def clock(self, model: Any) -> CoordinatedClock:
        """Returns what measures the steps of a model."""
        return CoordinatedClock(self.num_workers)

    def coordinated_function(
        self, model: Any, step_function: Any, clock: CoordinatedClock | None = None
    ) -> CoordinatedFunction:
        """Returns what Keras calls for the steps of `fit` and `evaluate`."""
        if model.jit_compile is True:
            raise UnsupportedError(
                explain(
                    "`jit_compile=True` cannot work here: XLA cannot reach variables on parameter servers.",
                    received="jit_compile=True",
                    expected="`jit_compile='auto'` or `jit_compile=False`",
                    do="Remove `jit_compile=True` from `model.compile(...)`.",
                )
            )
        return CoordinatedFunction(self, model, step_function, clock)

    def finish_steps(self) -> None:
        """Waits for the steps that are on their way."""
        if self.unfinished is not None:
            self.unfinished.finish()

    def settle_steps(self) -> None:
        """Waits for them in the middle of an epoch, after which the variables hold all that they came to."""
        if self.unfinished is not None:
            self.unfinished.settle()

    def abandon_steps(self) -> None:
        """After an error in `fit` or `evaluate`: waits for what is on its way, so that the next finds nothing of it."""
        function, self.unfinished = self.unfinished, None
        if function is not None:
            function.forget()
        while not self._is_idle():
            try:
                self._check_life()
            except tf.errors.UnavailableError:
                return
            time.sleep(_IDLE_POLL_EVERY_S)

    def _is_idle(self) -> bool:
        try:
            return bool(self.coordinator.done())
        except Exception:  # TensorFlow cancels all steps when it raises the error of one; ours raised the first.
            return False

    def schedule(self, step: Any, args: tuple) -> Any:
        """Hands a step to the next worker that is free; returns its `RemoteValue`."""
        return self.coordinator.schedule(step, args=args)

    def raise_errors_of_steps(self) -> None:
        """Raises what a step raised that is no worker's death."""
        self.coordinator.done()

    def lost_workers(self) -> set[int]:
        """Returns the workers that are gone for longer than a restart may take."""
        names = [f"worker {i}" for i in range(self.num_workers)]
        return {names.index(n) for n in self._watch.missing(names, self._heartbeat_timeout_s)}

    def check_workers(self) -> None:
        """Raises an error if waiting for steps makes no sense any more.

        Raises:
            tf.errors.UnavailableError: if a server is gone or silent, all workers are gone, or one that holds
                a step is silent.
        """
        self.raise_errors_of_steps()
        self._check_life()

    def _check_life(self) -> None:
        servers = [name for name in self._addresses if name.startswith("ps")]
        workers = [name for name in self._addresses if name.startswith("worker")]
        limit = self._heartbeat_timeout_s
        lost = self._watch.missing(servers, limit)
        if lost:
            raise self._unavailable(lost, "The variables on it cannot be reached")
        silent = [n for n in self._watch.missing(workers, limit) if self._watch.sign(n) is Sign.SILENT]
        if silent:
            raise self._unavailable(silent, "The step that it holds does not end")
        lost = self._watch.missing(workers, limit)
        if len(lost) == len(workers):
            raise self._unavailable(lost, "There is no worker left")

    def _unavailable(self, names: list[str], why: str) -> tf.errors.OpError:
        seen = "; ".join(f"{name} at {self._addresses[name]}: {self._watch.sign(name).value}" for name in names)
        text = explain(
            f"{_title(names[0])} has shown no sign of life for {self._heartbeat_timeout_s:g} seconds "
            f"(`heartbeat_timeout_s`). {why}.",
            received=seen,
            do="Look at the log of that task for the first error: it was killed, stopped, or cut off the network.",
        )
        return tf.errors.UnavailableError(None, None, text)

    def explained_error(self, error: tf.errors.OpError) -> tf.errors.OpError | None:
        """Returns an error that names the server that is gone; None if an error says something else."""
        message = str(error.message)
        lost = isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError))
        if not lost or "heartbeat_timeout" in message:
            return None
        # Seen at once: the watch looks every second.
        gone = [n for n in self._addresses if n.startswith("ps") and self._named(n, message)]
        if not gone:
            return None
        text = explain(
            f"{_title(gone[0])} ({self._addresses[gone[0]]}) is gone, and the variables on it with it.",
            received=_telling_line(message),
            do="Look at its log for the first error; start the job again, from its last checkpoint "
            "(`tfdistkit run --max-restarts`).",
        )
        return tf.errors.UnavailableError(error.node_def, error.op, text)

    def _named(self, name: str, message: str) -> bool:
        port = self._addresses[name].rpartition(":")[2]
        return f"/job:ps/replica:0/task:{name.split()[1]}" in message or f":{port}" in message


def build(
    cluster: ClusterSpec,
    *,
    variable_partitioner: Any = None,
    max_inflight_per_worker: int = _INFLIGHT_PER_WORKER,
    timeout_s: float = _TIMEOUT_S,
    heartbeat_timeout_s: float = _HEARTBEAT_TIMEOUT_S,
    synchronous: bool = False,
) -> ParameterServerStrategy:
    """Makes the strategy `parameter_server` in the coordinator; in a worker or a server it serves, and ends.

    Args:
        cluster: Which process this is, and the addresses of all: a chief, workers and parameter servers.
        variable_partitioner: Refused: Keras 3 cannot train TensorFlow's sharded variables.
        max_inflight_per_worker: How many steps may be on their way for each worker, at least 1.
        timeout_s: Seconds to wait for the other tasks at the start.
        heartbeat_timeout_s: Seconds without a sign of life after which a task is given up.
        synchronous: Refused: `multiworker` is the synchronous strategy.

    Returns:
        In the coordinator: a `tf.distribute.ParameterServerStrategy`.

    Raises:
        SystemExit: with code 0 in a worker or a server, when the coordinator is gone.
        OptionError: if an option is wrong.
        ClusterConfigError: if the cluster has no chief, no workers or no servers, or this process cannot take
            its address.
        TooLateError: if TensorFlow has its devices already.
        RendezvousError: if a task does not come within `timeout_s`.
        UnsupportedError: for `variable_partitioner`, and in an evaluator.
    """
    _check_options(variable_partitioner, max_inflight_per_worker, timeout_s, heartbeat_timeout_s, synchronous)
    _check_roles(cluster)
    if cluster.task.role != "chief":
        serve(cluster, timeout_s)
    require_not_started("the coordinator")
    check_own_address(cluster)
    # Its steps run on the workers: it leaves the GPUs of its host to them.
    tf.config.set_visible_devices([], "GPU")
    env.put("GRPC_FAIL_FAST", "use_caller")
    addresses = _task_addresses(cluster)
    missing = wait_for(addresses, timeout_s)
    if missing:
        raise RendezvousError(
            explain(
                f"Not all tasks came within {timeout_s:g} seconds (`timeout_s`).",
                received="; ".join(f"{name} at {addresses[name]}: {sign.value}" for name, sign in missing.items()),
                expected=f"all of: {', '.join(addresses)}",
                do="Look at the logs of those that did not come; each task runs the same script.",
            )
        )
    keras_patches.install()
    return ParameterServerStrategy(cluster, max_inflight_per_worker, heartbeat_timeout_s)


def _title(name: str) -> str:
    return name.replace("ps", "Parameter server").replace("worker", "Worker")


def _telling_line(message: str) -> str:
    """Returns what TensorFlow says of the connection, of a message of many lines."""
    lines = message.strip().splitlines()
    return next((line for line in lines if "connect" in line.lower()), lines[0]).strip().rstrip(".")[:300]


def _task_addresses(cluster: ClusterSpec) -> dict[str, str]:
    return {f"{r} {i}": a for r in ("ps", "worker") for i, a in enumerate(cluster.addresses[r])}


def _check_options(partitioner: Any, inflight: Any, timeout_s: Any, heartbeat_timeout_s: Any, synchronous: Any) -> None:
    if synchronous:
        raise OptionError(
            explain(
                "`synchronous=True` is no mode of 'parameter_server': its workers do not wait for each other.",
                received="synchronous=True",
                do='Ask for tfdistkit.strategy("multiworker").',
            )
        )
    if partitioner is not None:
        raise UnsupportedError(
            explain(
                "`variable_partitioner` cannot work: Keras 3 cannot train TensorFlow's sharded variables.",
                received=f"variable_partitioner={partitioner!r}",
                do="Use tfdistkit.layers.ShardedEmbedding for a table that is larger than one server.",
            )
        )
    if isinstance(inflight, bool) or not isinstance(inflight, int) or inflight < 1:
        raise OptionError(
            explain(
                "`max_inflight_per_worker` is not a number of steps.", received=repr(inflight), expected="1 or more"
            )
        )
    for name, value in (("timeout_s", timeout_s), ("heartbeat_timeout_s", heartbeat_timeout_s)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise OptionError(
                explain(f"`{name}` is no time.", received=f"{name}={value!r}", expected="seconds, more than 0")
            )


def _check_roles(cluster: ClusterSpec) -> None:
    if cluster.task.role == "evaluator":
        raise UnsupportedError(
            explain(
                "An evaluator takes no part in training.",
                received=f"the task type 'evaluator' in {cluster.source}",
                expected="a task type of 'chief', 'worker' or 'ps'",
                do="Let it load the checkpoints of the training, without this strategy.",
            )
        )
    missing = [role for role in ("chief", "worker", "ps") if not cluster.addresses.get(role)]
    if missing:
        raise ClusterConfigError(
            explain(
                f"The strategy 'parameter_server' needs a chief, workers and parameter servers; missing: {missing[0]}.",
                received=f"{cluster.source} with {', '.join(cluster.addresses) or 'no tasks'}",
                expected="at least one task of each of: chief, worker, ps",
                do="Start the script with `tfdistkit run --ps 1 -np 2 train.py`, or list all of them in TF_CONFIG.",
            )
        )
