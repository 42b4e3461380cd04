"""`parameter_server`: variables on servers, asynchronous steps on workers, one coordinator."""

from __future__ import annotations

import atexit
import contextlib
import time
import warnings
from typing import Any

import tensorflow as tf

from tfdistkit import env
from tfdistkit.cluster.liveness import Sign, Watch, wait_for
from tfdistkit.cluster.own_address import check_own_address
from tfdistkit.cluster.rendezvous.exchange import DEFAULT_TIMEOUT_S
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.communication import Reducer
from tfdistkit.errors import ClusterConfigError, OptionError, RendezvousError, UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.report.broken_exit import leave_at_once
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.contract import KerasStrategyMixin
from tfdistkit.strategies.devices import require_not_started
from tfdistkit.strategies.parameter_server import atomic_updates
from tfdistkit.strategies.parameter_server.profiling import CoordinatedClock
from tfdistkit.strategies.parameter_server.scheduled_functions import count_updates
from tfdistkit.strategies.parameter_server.scheduler import CoordinatedFunction
from tfdistkit.strategies.parameter_server.server import dismiss, serve
from tfdistkit.strategies.parameter_server.watched_variables import as_watched
from tfdistkit.strategies.parameter_server.worker_datasets import WorkerDataset, made_by_worker, require_all_data
from tfdistkit.strategies.sync.replica import ReplicaMixin
from tfdistkit.validation import require_integer, require_positive

# Seconds without a sign of life after which a task counts as lost. TensorFlow has no such timeout.
_HEARTBEAT_TIMEOUT_S = 20.0
# Enough to keep a worker busy, few enough to limit the steps that are lost with a worker.
_INFLIGHT_PER_WORKER = 4
# Poll interval, in seconds, for the end of the steps of a failed run.
_IDLE_POLL_EVERY_S = 0.005


class ParameterServerExtended(ReplicaMixin, private_api.ParameterServerStrategyV2Extended):
    """Runs a step on a worker. No merge_call: accumulation and EMA run in branches (keras#20582)."""

    def _run_inline(self, fn: Any, args: tuple, kwargs: dict) -> Any:
        # An eager step runs in the coordinator, where no other step runs beside it.
        with contextlib.nullcontext() if tf.executing_eagerly() else atomic_updates.running():
            return super()._run_inline(fn, args, kwargs)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        return as_watched(super()._create_variable(next_creator, **kwargs))


class ParameterServerStrategy(KerasStrategyMixin, tf.distribute.ParameterServerStrategy):
    """A `tf.distribute.ParameterServerStrategy` that works with Keras 3, and loses no update.

    Args:
        cluster: The addresses of all tasks.
        max_inflight_per_worker: Maximum number of steps in flight for each worker.
        heartbeat_timeout_s: Seconds without a sign of life after which a task counts as lost.
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
        private_api.wait_for_own_operations_only()  # For custom loops; `fit` may run in another thread.
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self)
        self._schedule = count_updates(self.coordinator)
        self.num_workers = len(cluster.addresses["worker"])
        self.max_inflight = max_inflight_per_worker * self.num_workers
        # The function of `fit` or `evaluate` that has steps in flight.
        self.unfinished: CoordinatedFunction | None = None
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._addresses = _task_addresses(cluster)
        self._watch = Watch(self._addresses)
        atexit.register(self._shut_down_tasks)

    def _shut_down_tasks(self) -> None:
        """Ends the workers and servers when this process, the coordinator, ends."""
        private_api.leave_functions()
        alive = [name.split() for name in self._addresses if self._watch.sign(name) is Sign.ALIVE]
        dismiss(f"/job:{role}/replica:0/task:{index}" for role, index in alive)
        if len(alive) < len(self._addresses):
            leave_at_once()

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Makes one input pipeline on each worker; `fit`, `evaluate` and `predict` take it.

        Args:
            dataset_fn: `dataset_fn(input_context) -> tf.data.Dataset`, the batches of that input pipeline.
            options: `tf.distribute.InputOptions`; ignored, as in TensorFlow.

        Returns:
            A `tf.distribute.DistributedDataset`.
        """
        if tf.inside_function():  # ClusterCoordinator.create_per_worker_dataset, in a custom loop.
            return super().distribute_datasets_from_function(made_by_worker(dataset_fn), options)
        return WorkerDataset(self, dataset_fn)

    def distribute_keras_batches(self, dataset: Any, sample: Any = None) -> Any:
        """Returns the data of `fit`, `evaluate` or `predict`, which this process reads.

        Raises:
            UnsupportedError: if it is the part of one worker.
        """
        require_all_data(dataset, self.num_workers)
        return super().distribute_keras_batches(dataset, sample)

    def clock(self, model: Any) -> CoordinatedClock:
        """Returns a clock for the steps of a model."""
        return CoordinatedClock(self.num_workers)

    def coordinated_function(
        self, model: Any, step_function: Any, clock: CoordinatedClock | None = None
    ) -> CoordinatedFunction:
        """Returns the function that Keras calls for the steps of `fit` and `evaluate`."""
        if model.jit_compile is True:
            raise UnsupportedError(
                explain(
                    "`jit_compile=True` cannot work here: XLA cannot reach variables on parameter servers.",
                    received="jit_compile=True",
                    expected="`jit_compile='auto'` or `jit_compile=False`",
                    do="Remove `jit_compile=True` from `model.compile(...)`.",
                )
            )
        if model.run_eagerly:
            _warn_not_eager()
        return CoordinatedFunction(self, model, step_function, clock)

    def check_own_reducer(self, reducer: Reducer) -> None:
        """Raises:
        UnsupportedError: always. A worker sends its gradients to servers, as they are.
        """
        raise UnsupportedError(
            explain(
                "An optimizer that compresses what workers send each other cannot work with parameter servers.",
                received=reducer.describe(),
                do='Use keras.optimizers.Adam(...), or tfdistkit.strategy("multiworker").',
            )
        )

    def finish_steps(self) -> None:
        """Waits for the steps in flight."""
        if self.unfinished is not None:
            self.unfinished.finish()

    def settle_steps(self) -> None:
        """Waits for the steps in flight in the middle of an epoch, and writes their results to the variables."""
        if self.unfinished is not None:
            self.unfinished.settle()

    def settle_weights(self) -> None:
        """Waits for the steps in flight, before a callback predicts or evaluates in the middle of an epoch."""
        self.settle_steps()

    def abandon_steps(self) -> None:
        """Drains the steps in flight after an error in `fit` or `evaluate`, so that the next call starts clean."""
        function, self.unfinished = self.unfinished, None
        if function is not None:
            function.forget()
        while not self._is_idle():
            try:
                self._check_liveness()
            except tf.errors.UnavailableError:
                return
            time.sleep(_IDLE_POLL_EVERY_S)

    def _is_idle(self) -> bool:
        try:
            return bool(self.coordinator.done())
        except Exception:  # TensorFlow cancels all steps after the first error, which was raised already.
            return False

    def schedule(self, step: Any, args: tuple) -> Any:
        """Schedules a step on the next free worker; returns its `RemoteValue`."""
        return self._schedule(step, args=args)

    def raise_errors_of_steps(self) -> None:
        """Raises the error of a step, other than the loss of its worker."""
        self.coordinator.done()

    def lost_workers(self) -> set[int]:
        """Returns the workers that have been gone for longer than `heartbeat_timeout_s`."""
        names = [f"worker {i}" for i in range(self.num_workers)]
        return {names.index(n) for n in self._watch.missing(names, self._heartbeat_timeout_s)}

    def check_workers(self) -> None:
        """Raises an error if the steps in flight cannot finish.

        Raises:
            tf.errors.UnavailableError: if a server is gone or silent, all workers are gone, or a worker with a step
                is silent.
        """
        self.raise_errors_of_steps()
        self._check_liveness()

    def _check_liveness(self) -> None:
        servers = [name for name in self._addresses if name.startswith("ps")]
        workers = [name for name in self._addresses if name.startswith("worker")]
        limit = self._heartbeat_timeout_s
        lost = self._watch.missing(servers, limit)
        if lost:
            raise self._unavailable(lost, "The variables on it cannot be reached")
        silent = [n for n in self._watch.missing(workers, limit) if self._watch.sign(n) is Sign.SILENT]
        if silent:
            raise self._unavailable(silent, "Its step in flight cannot finish")
        lost = self._watch.missing(workers, limit)
        if len(lost) == len(workers):
            raise self._unavailable(lost, "There is no worker left")

    def _unavailable(self, names: list[str], why: str) -> tf.errors.OpError:
        received = "; ".join(f"{name} at {self._addresses[name]}: {self._watch.sign(name).value}" for name in names)
        text = explain(
            f"{_title(names[0])} has shown no sign of life for {self._heartbeat_timeout_s:g} seconds "
            f"(`heartbeat_timeout_s`). {why}.",
            received=received,
            do="Look at the log of that task for the first error: it was killed, stopped, or cut off the network.",
        )
        return tf.errors.UnavailableError(None, None, text)

    def explained_error(self, error: tf.errors.OpError) -> tf.errors.OpError | None:
        """Returns an error that names the lost server; None if the error has another cause."""
        message = str(error.message)
        lost = isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError))
        if not lost or "heartbeat_timeout" in message:
            return None
        # By the message, not the watch, which polls once a second.
        gone = [n for n in self._addresses if n.startswith("ps") and self._is_named_in(n, message)]
        if not gone:
            return None
        text = explain(
            f"{_title(gone[0])} ({self._addresses[gone[0]]}) is gone, and the variables on it with it.",
            received=_connection_line(message),
            do="Look at its log for the first error; start the job again, from its last checkpoint "
            "(`tfdistkit run --max-restarts`).",
        )
        return tf.errors.UnavailableError(error.node_def, error.op, text)

    def _is_named_in(self, name: str, message: str) -> bool:
        port = self._addresses[name].rpartition(":")[2]
        return f"/job:ps/replica:0/task:{name.split()[1]}" in message or f":{port}" in message


def build(
    cluster: ClusterSpec,
    *,
    variable_partitioner: Any = None,
    max_inflight_per_worker: int = _INFLIGHT_PER_WORKER,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    heartbeat_timeout_s: float = _HEARTBEAT_TIMEOUT_S,
    synchronous: bool = False,
) -> ParameterServerStrategy:
    """Makes the strategy `parameter_server` in the coordinator; in a worker or server, serves until it exits.

    Args:
        cluster: Which process this is, and the addresses of all: a chief, workers and parameter servers.
        variable_partitioner: Must be None: Keras 3 cannot train TensorFlow's sharded variables.
        max_inflight_per_worker: Maximum number of steps in flight for each worker, at least 1.
        timeout_s: Seconds to wait for the other tasks at the start.
        heartbeat_timeout_s: Seconds without a sign of life after which a task counts as lost.
        synchronous: Must be False: `multiworker` is the synchronous strategy.

    Returns:
        In the coordinator: a `tf.distribute.ParameterServerStrategy`.

    Raises:
        SystemExit: with code 0 in a worker or a server, when the coordinator is gone.
        OptionError: if an option is wrong.
        ClusterConfigError: if the cluster has no chief, no workers or no servers, or this process cannot bind
            its address.
        TooLateError: if TensorFlow has already initialized its devices.
        RendezvousError: if a task is missing after `timeout_s`.
        UnsupportedError: for `variable_partitioner`, and in an evaluator.
    """
    _check_options(variable_partitioner, max_inflight_per_worker, timeout_s, heartbeat_timeout_s, synchronous)
    _check_roles(cluster)
    if cluster.task.role != "chief":
        serve(cluster, timeout_s)
    require_not_started("the coordinator")
    check_own_address(cluster)
    # The coordinator runs no steps: it leaves the GPUs of its host to the workers.
    tf.config.set_visible_devices([], "GPU")
    env.put("GRPC_FAIL_FAST", "use_caller")
    addresses = _task_addresses(cluster)
    missing = wait_for(addresses, timeout_s)
    if missing:
        raise RendezvousError(
            explain(
                f"Not all tasks were reachable within {timeout_s:g} seconds (`timeout_s`).",
                received="; ".join(f"{name} at {addresses[name]}: {sign.value}" for name, sign in missing.items()),
                expected=f"all of: {', '.join(addresses)}",
                do="Look at the logs of the missing tasks; each task runs the same script.",
            )
        )
    keras_patches.install()
    return ParameterServerStrategy(cluster, max_inflight_per_worker, heartbeat_timeout_s)


def _warn_not_eager() -> None:
    warnings.warn(
        explain(
            "Steps cannot run eagerly here: workers run them as graphs. Code of Python in a step (`self.steps += 1`, "
            "`float(loss)`, `x.numpy()`) runs once, when the step is traced, or fails.",
            received="run_eagerly=True",
            do="Remove it from `model.compile(...)`, and compute with tensors: keras.Variable(...).assign_add(1), "
            "tf.numpy_function(...). To debug a step, run the script without the strategy.",
        ),
        stacklevel=2,
    )


def _title(name: str) -> str:
    return name.replace("ps", "Parameter server").replace("worker", "Worker")


def _connection_line(message: str) -> str:
    """Returns the line about the connection out of a long error message of TensorFlow."""
    lines = message.strip().splitlines()
    return next((line for line in lines if "connect" in line.lower()), lines[0]).strip().rstrip(".")[:300]


def _task_addresses(cluster: ClusterSpec) -> dict[str, str]:
    return {f"{r} {i}": a for r in ("ps", "worker") for i, a in enumerate(cluster.addresses[r])}


def _check_options(partitioner: Any, inflight: Any, timeout_s: Any, heartbeat_timeout_s: Any, synchronous: Any) -> None:
    if synchronous:
        raise OptionError(
            explain(
                "`synchronous` must be False: the workers of 'parameter_server' run asynchronously.",
                received=f"synchronous={synchronous!r}",
                do='Use tfdistkit.strategy("multiworker").',
            )
        )
    if partitioner is not None:
        raise UnsupportedError(
            explain(
                "`variable_partitioner` must be None: Keras 3 cannot train TensorFlow's sharded variables.",
                received=f"variable_partitioner={partitioner!r}",
                do="Use tfdistkit.layers.ShardedEmbedding for a table that is larger than one server.",
            )
        )
    require_integer("max_inflight_per_worker", inflight)
    require_positive("timeout_s", timeout_s, "seconds")
    require_positive("heartbeat_timeout_s", heartbeat_timeout_s, "seconds")


def _check_roles(cluster: ClusterSpec) -> None:
    if cluster.task.role == "evaluator":
        raise UnsupportedError(
            explain(
                "An evaluator takes no part in training, so it cannot use 'parameter_server'.",
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
