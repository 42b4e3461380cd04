"""A process that runs programs on request: `python -m fuzz.worker ENGINE ADDRESS [FAULT]`.

Each message is a dict (program, folder, floatx, trains); each answer a dict (values, arrays, error, seconds), with the
seconds of CPU time that it took.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client
from typing import Any

import keras
import tensorflow as tf

from fuzz import objectives
from fuzz.programs import Program
from fuzz.running import Session

# Shorter than the pool's timeout, so that a rank that hangs raises its own error.
COLLECTIVE_TIMEOUT_S = 60


def _strategy(engine: str) -> Any:
    if engine == "plain":
        # The result of `result()` is a variable there: logs of an epoch change with its validation.
        objectives.OwnSum.result = lambda metric: metric.total * 1.0
        return tf.distribute.get_strategy()  # Without tfdistkit in the process.
    if engine.startswith("multiworker_"):
        from parity import making

        return making.make_strategy(engine)
    import tfdistkit

    options: dict[str, Any] = {}
    if engine in ("mirrored", "central_storage"):
        options = {"devices": 2}
    if engine in ("multiworker", "horovod"):
        options = {"timeout_s": COLLECTIVE_TIMEOUT_S}
    return tfdistkit.strategy(engine.partition(":")[0], **options)


def _described(error: BaseException) -> dict[str, Any]:
    """Returns an error as plain data: whether it is one of ours, and its traceback."""
    ours = any(kind.__module__ == "tfdistkit.errors" for kind in type(error).__mro__)
    return {
        "type": type(error).__name__,
        "ours": ours,
        "message": str(error)[:2000],
        "traceback": "".join(traceback.format_exception(error))[-6000:],
    }


def run(engine: str, strategy: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Runs one program and returns its results."""
    keras.utils.clear_session()
    keras.config.set_floatx(message["floatx"])
    keras.config.set_dtype_policy(message["floatx"])
    os.makedirs(message["folder"], exist_ok=True)
    program = Program.from_json(message["program"])
    session = Session(program, strategy, message["folder"], engine != "plain", message["trains"])
    start, error = time.process_time(), None
    try:
        session.run()
    except Exception as raised:
        error = _described(raised)
    answer = {"values": session.values, "arrays": session.arrays, "error": error}
    return {**answer, "seconds": round(time.process_time() - start, 2)}


def _own_rank() -> int:
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
    return int(task["index"])


def main(engine: str, address: str, fault: str = "") -> None:
    """Makes the strategy, then serves until the pool closes the connection."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    keras.config.disable_traceback_filtering()
    if fault:
        from fuzz import planted

        planted.plant(fault)
    strategy = _strategy(engine)  # Workers and servers do not return from it.
    connection = Client(address)
    connection.send(_own_rank())
    while True:
        try:
            message = connection.recv()
        except EOFError:
            os._exit(0)  # TensorFlow's threads might deadlock at exit.
        connection.send(run(engine, strategy, message))
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
