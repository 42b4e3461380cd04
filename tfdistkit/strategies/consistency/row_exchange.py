"""Exchanges a row of numbers between the processes of a strategy, for their comparisons.

Processes on one host use Unix sockets while they are in step: some tenths of a millisecond, where TensorFlow's smallest
collective takes 2 ms. A rank whose peers are late falls back to the collective, and so do its peers: TensorFlow's error
names ranks that are gone, or that run different steps.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.cluster import local_exchange
from tfdistkit.cluster.local_exchange import LocalExchange
from tfdistkit.keras_adapter import private_api

# Relative to the largest value.
_ROUNDING = 1e-3

# By strategy; None where a process is on another host.
_exchanges: weakref.WeakKeyDictionary[Any, LocalExchange | None] = weakref.WeakKeyDictionary()


def table(strategy: Any, row: np.ndarray) -> np.ndarray:
    """Returns the rows of all processes, in the order of the ranks.

    Args:
        strategy: The strategy.
        row: The numbers of this process, of the same length on all processes.
    """
    row = np.asarray(row, np.int64)
    if strategy not in _exchanges:
        _exchanges[strategy] = _connect(strategy)
    exchange = _exchanges[strategy]
    if exchange is None or row.nbytes > local_exchange.MOST_BYTES:
        return by_collective(strategy, row)
    rows = exchange.gather(row.tobytes())
    return by_collective(strategy, row) if rows is None else np.stack([np.frombuffer(one, np.int64) for one in rows])


def table_of_values(strategy: Any, samples: list[np.ndarray], most: int) -> np.ndarray:
    """Returns the values of all processes, by process and sample; zeros behind the last value of a sample.

    Args:
        strategy: The strategy.
        samples: Numbers, of any dtype; as many samples on all processes.
        most: How many values of each sample are exchanged.
    """
    own: np.ndarray = np.zeros((len(samples), most), np.float64)
    for place, sample in enumerate(samples):
        values = np.real(sample[:most]).astype(np.float64)
        own[place, : len(values)] = values
    everyone: np.ndarray = table(strategy, own.reshape(-1).view(np.int64)).view(np.float64)
    return everyone.reshape(len(everyone), *own.shape)


def are_close(first: np.ndarray, own: np.ndarray) -> bool:
    """Returns whether values differ by no more than the rounding of other processors.

    Args:
        first: Values of rank 0.
        own: Those of another rank.
    """
    largest = float(np.nanmax(np.abs([first, own]), initial=0.0))
    return bool(np.allclose(own, first, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True))


def _connect(strategy: Any) -> LocalExchange | None:
    """Connects the processes if all are on one host; returns None on all of them if one cannot connect."""
    rank = private_api.first_replica_id(strategy) // len(strategy.extended.worker_devices)
    host = local_exchange.host_id()
    listener = local_exchange.Listener() if host and rank == 0 else None
    token = bytes(local_exchange.TOKEN_BYTES) if listener is None else listener.token
    everyone = by_collective(strategy, np.array([host, *np.frombuffer(token, np.int64)], np.int64))
    if not host or not (everyone[:, 0] == host).all():
        if listener is not None:
            listener.close()
        return None
    try:
        if listener is not None:
            exchange: LocalExchange | None = listener.accept(len(everyone))
        else:
            exchange = local_exchange.connect(everyone[0, 1:].tobytes(), rank)
    except OSError:
        exchange = None
    is_everywhere = by_collective(strategy, np.array([exchange is not None], np.int64)).all()
    if not is_everywhere and exchange is not None:
        exchange.close()
    return exchange if is_everywhere else None


def by_collective(strategy: Any, row: np.ndarray) -> np.ndarray:
    """Returns the rows of all processes by an all-reduce of TensorFlow, on any hosts.

    Args:
        strategy: The strategy.
        row: The numbers of this process, of the same length on all processes.
    """
    replicas, devices = strategy.num_replicas_in_sync, len(strategy.extended.worker_devices)
    own = np.zeros((replicas, len(row)), np.int64)
    own[private_api.first_replica_id(strategy)] = row
    if devices == 1:
        return np.asarray(strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(own), axis=None))
    zeros = np.zeros_like(own)

    @tf.autograph.experimental.do_not_convert
    def in_replica() -> Any:
        context = tf.distribute.get_replica_context()
        is_first = private_api.replica_id(context) == private_api.first_replica_id(strategy)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(own if is_first else zeros))

    summed = strategy.experimental_local_results(strategy.run(in_replica))[0]
    return np.asarray(summed)[::devices]
