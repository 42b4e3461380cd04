"""Two hosts with two ranks each: bytes and time of a sum, within the hosts first against a ring of all ranks.

Both take turns within one job. Bytes are those that the first host sends and receives, by the counters of its network
interface; CPU seconds are those of all ranks, which depend less than the time on what else the machine does.
Needs root: the hosts are network namespaces with sshd.
Run: python benchmarks/hosts.py [--rate 1gbit]
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
from net_hosts import net_hosts, why_no_hosts

_SCRIPT = """
import json, os, sys, time
import tfdistkit
strategy = tfdistkit.strategy("multiworker", communication="hierarchical")
import tensorflow as tf

def of_interface():
    with open("/proc/net/dev") as file:
        [line] = [line for line in file if line.strip().startswith("eth0:")]
    numbers = line.partition(":")[2].split()
    return int(numbers[0]) + int(numbers[8])

def cpu_seconds():
    times = os.times()
    return times.user + times.system

def summed(elements, sums):
    variable = tf.Variable(tf.ones(elements))
    def run():
        tensor = variable.read_value()
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tensor))
    strategy.hierarchical_sums, kept = sums, strategy.hierarchical_sums
    traced = tf.function(run).get_concrete_function()
    strategy.hierarchical_sums = kept
    return traced

rounds, found = int(sys.argv[1]), {}
for size, elements in (("1 MB", 250_000), ("10 MB", 2_500_000), ("100 MB", 25_000_000)):
    calls = {"ring": summed(elements, None), "hierarchical": summed(elements, strategy.hierarchical_sums)}
    results = {name: call() for name, call in calls.items()}
    assert all(float(tf.reduce_min(one)) == float(tf.reduce_max(one)) == 4 for one in results.values())
    for _ in range(rounds):
        for name, call in calls.items():
            tfdistkit.collectives.barrier()
            before, used, start = of_interface(), cpu_seconds(), time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            used = cpu_seconds() - used
            tfdistkit.collectives.barrier()
            nbytes = of_interface() - before
            used = float(tfdistkit.collectives.all_reduce(used, op="sum"))
            found.setdefault(size, {}).setdefault(name, []).append((seconds, nbytes, used))
if tfdistkit.rank() == 0:
    print("found " + json.dumps(found), flush=True)
"""
_PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", help="rate of the link in the syntax of `tc`, such as 1gbit. Default: no limit")
    args = parser.parse_args()
    if why_no_hosts():
        raise SystemExit(f"cannot create hosts: {why_no_hosts()}")
    variables = {"PYTHONPATH": os.pathsep.join(_PATHS), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3",
                 "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}  # fmt: skip
    given = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder, net_hosts(Path(folder, "net"), 2) as hosts:
        script = hosts.write("sums.py", _SCRIPT)
        for number in hosts.numbers:
            hosts.shape(number, args.rate)
        words = ["run", "-H", "h1:2,h2:2", *given, "--start-timeout", "300", str(script), str(args.rounds)]
        command = hosts.command(0, sys.executable, "-m", "tfdistkit", *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"failed: {done.stdout}\n{done.stderr}")
    [line] = [line for line in done.stdout.splitlines() if "found {" in line]
    for size, of_size in json.loads(line[line.index("{") :]).items():
        ring, own = of_size["ring"], of_size["hierarchical"]
        speed = statistics.median(r[0] / o[0] for r, o in zip(ring, own))
        for name, of_name in (("ring", ring), ("hierarchical", own)):
            seconds, nbytes, used = (statistics.median(one[i] for one in of_name) for i in range(3))
            least = min(one[0] for one in of_name)
            print(f"{size:<7} {name:<13} {seconds * 1e3:.1f} ms (least {least * 1e3:.1f}), {nbytes / 1e6:.2f} MB, "
                  f"{used:.2f} CPU seconds", flush=True)  # fmt: skip
        print(f"{size:<7} speed of hierarchical over ring {speed:.2f}", flush=True)


if __name__ == "__main__":
    main()
