"""From the command to the first step of training on two hosts: `tfdistkit run -H` against starting both by hand.

By hand: `ssh host1 env TF_CONFIG=... python train.py`, and the same for the other host, at the same time. Goal: at most
1.5 s more. Without --hosts it creates two hosts (network namespaces with sshd), which needs root. With --bare the
script does not load TensorFlow, so the difference between the two ways can also be measured on a busy machine.
Run: python benchmarks/startup_on_hosts.py [--bare] [--hosts node1,node2 --folder DIR]; DIR is the same on all hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pairs

from tfdistkit.cluster import free_ports

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "integration"))
from net_hosts import net_hosts, why_no_hosts

_SCRIPT = """
import os, time
os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
import tfdistkit
strategy = tfdistkit.strategy("multiworker")
import keras, numpy as np
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile("sgd", "mse")
class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("first step", flush=True)
        time.sleep(0.3)  # the peer may still need data of this step
        os._exit(0)
model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0, callbacks=[Tell()])
"""
_BARE = 'print("first step", flush=True)\n'
_DEADLINE_S = 300.0
_PATHS = os.environ.get("PYTHONPATH", "")


class Place:
    """Holds the prefix of commands, the names and addresses of the hosts, and the script in their common folder."""

    def __init__(self, enter: Callable[..., list[str]], names: list[str], addresses: list[str], script: Path):
        self.enter, self.names, self.addresses, self.script = enter, names, addresses, script


@contextlib.contextmanager
def place_of(args: argparse.Namespace) -> Iterator[Place]:
    """Yields the hosts of the arguments, or two network namespaces."""
    if args.hosts:
        script = Path(args.folder, "first_step.py")
        script.write_text(_BARE if args.bare else _SCRIPT)
        names = args.hosts.split(",")
        yield Place(lambda *words: list(words), names, names, script)
        return
    if why_no_hosts():
        raise SystemExit(f"cannot create hosts: {why_no_hosts()}; pass --hosts node1,node2 --folder DIR")
    with tempfile.TemporaryDirectory() as folder, net_hosts(Path(folder, "net"), 2) as hosts:
        script = hosts.write("first_step.py", _BARE if args.bare else _SCRIPT)
        yield Place(lambda *words: hosts.command(0, *words), ["h1", "h2"], [hosts.address(1), hosts.address(2)], script)


def by_launcher(place: Place) -> float:
    """Returns the seconds of `tfdistkit run -H` until both hosts have taken a step."""
    words = ["run", "-H", ",".join(place.names), "-x", f"PYTHONPATH={_PATHS}", str(place.script)]
    return seconds_to([place.enter(sys.executable, "-m", "tfdistkit", *words)])


def by_hand(place: Place) -> float:
    """Returns the seconds of two ssh commands until both hosts have taken a step."""
    addresses = [f"{address}:{port}" for address, port in zip(place.addresses, free_ports(2))]
    commands = []
    for index, name in enumerate(place.names):
        config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
        variables = [f"TF_CONFIG={config}", f"PYTHONPATH={_PATHS}"]
        command = shlex.join(["env", *variables, sys.executable, str(place.script)])
        commands.append(place.enter("ssh", name, command))
    return seconds_to(commands)


def seconds_to(commands: list[list[str]]) -> float:
    """Runs commands at the same time, and returns the seconds until all have ended, after their first step."""
    start = time.perf_counter()
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in commands]
    outputs = [one.communicate(timeout=_DEADLINE_S) for one in running]
    seconds = time.perf_counter() - start
    if sum(out.count("first step") for out, _ in outputs) != 2:
        raise SystemExit(f"failed: {outputs}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="run a script without TensorFlow")
    parser.add_argument("--hosts", help="two hosts with ssh access; default: network namespaces")
    parser.add_argument("--folder", default=".", help="a folder that all hosts share")
    args = parser.parse_args()
    with place_of(args) as place:
        variants = {"by hand": lambda: by_hand(place), "tfdistkit run -H": lambda: by_launcher(place)}
        results = pairs.in_turn(variants, args.rounds)
    pairs.show(results, "by hand", "s")
    more = [a - b for a, b in zip(results["tfdistkit run -H"], results["by hand"])]
    print(f"the launcher takes {statistics.median(more):.3f} s more than starting both by hand")


if __name__ == "__main__":
    main()
