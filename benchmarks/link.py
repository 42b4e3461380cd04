"""Two hosts with a link of 1 Gbit/s between them: steps per second of a model of 25M weights, against the link's limit.

Each of two ranks sends and receives as many bytes as the gradients have, 100 MB, so the link allows one step in
`bytes / rate`. Needs root: the hosts are network namespaces with sshd, and the link is shaped.
Run: python benchmarks/link.py [--horovod DIR] [--rate 1gbit]; DIR holds Horovod if it is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "integration"))
from net_hosts import NetHosts, net_hosts, why_no_hosts

_SCRIPT = """
import json, sys, time
import tfdistkit
strategy = tfdistkit.strategy(sys.argv[1])
import keras, numpy as np
steps = int(sys.argv[2])
with strategy.scope():
    model = keras.Sequential([keras.Input((5000,)), keras.layers.Dense(5000, use_bias=False)])
    model.compile("sgd", "mse")
class Clock(keras.callbacks.Callback):
    times = []
    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter())
model.fit(np.ones((2 * (steps + 3), 5000), "float32"), np.ones((2 * (steps + 3), 5000), "float32"),
          batch_size=2, verbose=0, callbacks=[Clock()])
if tfdistkit.rank() == 0:
    found = {"bytes": 4 * model.count_params(), "seconds": np.diff(Clock.times[2:]).tolist()}
    print("found " + json.dumps(found), flush=True)
"""
_DEADLINE_S = 600
_UNITS = {"gbit": 1e9, "mbit": 1e6}
_PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def seconds_of_steps(hosts: NetHosts, backend: str, steps: int, paths: list[str]) -> tuple[int, list[float]]:
    """Trains on both hosts; returns the bytes of all gradients and the seconds of each step."""
    variables = {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    given = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    strategy = "horovod" if backend == "horovod" else "multiworker"
    words = ["run", "-H", "h1,h2", "--backend", backend, *given, "--start-timeout", "120"]
    done = subprocess.run(
        hosts.command(0, sys.executable, "-m", "tfdistkit", *words, str(hosts.work / "train.py"), strategy, str(steps)),
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    if done.returncode:
        raise SystemExit(f"failed: {done.stdout}\n{done.stderr}")
    (line,) = (line for line in done.stdout.splitlines() if "found {" in line)
    found = json.loads(line[line.index("{") :])
    return found["bytes"], found["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", default="1gbit", help="rate of the link in the syntax of `tc`: 1gbit, 100mbit")
    parser.add_argument("--horovod", help="a folder with Horovod")
    args = parser.parse_args()
    if why_no_hosts():
        raise SystemExit(f"cannot create hosts: {why_no_hosts()}")
    bits_per_s = float(args.rate[:-4]) * _UNITS[args.rate[-4:]]
    backends = {"local": _PATHS, "horovod": [args.horovod, *_PATHS] if args.horovod else _PATHS}
    with tempfile.TemporaryDirectory() as folder, net_hosts(Path(folder, "net"), 2) as hosts:
        hosts.write("train.py", _SCRIPT)
        for backend, paths in backends.items():
            for rate in (None, args.rate):
                for number in hosts.numbers:
                    hosts.shape(number, rate)
                size, seconds = seconds_of_steps(hosts, backend, args.steps, paths)
                median = statistics.median(seconds)
                limit = f", {size * 8 / bits_per_s / median:.3f} of the link's limit" if rate else ""
                line = f"{1 / median:.2f} steps/s ({median:.3f} s){limit}"
                print(f"{backend:<8} {rate or 'no limit':<9} {line}", flush=True)


if __name__ == "__main__":
    main()
