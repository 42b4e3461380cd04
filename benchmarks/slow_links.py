"""Two hosts and a link: the bytes of each way to send, the time to the same loss, and the speed of two hosts over one.

`wide`: a net of 25M weights learns scikit-learn's digits, projected to 1,000 numbers, over 100 Mbit/s. Its losses
without a compression are those of one process on the same batches, and a step takes as long as its 100 MB travel: some
steps over the link tell. On a busy machine the seconds of the others are too many, so the processor time of a step, and
what its bytes take on the link, are told, too: their sum is the time where each worker has a core. It is compared with
what the bytes of `none` take on the link.

`words`: a language model of 4.6M weights on Python's own sources, one host of one thread against two over 1 Gbit/s,
with the same rows a host; `apart` are two hosts that do not communicate, which is what the machine allows.

`bytes`: what a step of a net of a million weights sends and receives, by the counters of a host's network interface,
against the exact sum. They are those of the second epoch, after every warm-up; the averages of an epoch's end count.

Needs root: the hosts are network namespaces with sshd, and the link is shaped.
Run: python benchmarks/slow_links.py wide|words|bytes [--rate 100mbit] [--only NAME ...] [--save FILE]
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
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "integration"))
from net_hosts import NetHosts, net_hosts, why_no_hosts

# Name -> options of the strategy, and how many steps lie between two looks at the held-out rows.
_WIDE = {
    "none": ("{}", 20),
    "fp16": ("{'compression': 'fp16'}", 20),
    "ByteGrad()": ("{'compression': c.ByteGrad()}", 20),
    "PowerSGD(4)": ("{'compression': c.PowerSGD(4)}", 20),
    "TopK(0.01)": ("{'compression': c.TopK(0.01)}", 20),
    "LocalSGD(100)": ("{'algorithm': a.LocalSGD(100)}", 100),
}
_SCRIPT = """
import json, sys, time
import tfdistkit
from tfdistkit import algorithms as a, compression as c
task, options, look, steps, target = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), float(sys.argv[5])
options = eval(options)
is_alone = options == "alone"
strategy = tfdistkit.strategy("one_device") if is_alone else tfdistkit.strategy("multiworker", **options)
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(0)
random = np.random.default_rng(1)
workers = strategy.num_replicas_in_sync

def wide():
    from sklearn.datasets import load_digits
    x, y = load_digits(return_X_y=True)
    order = random.permutation(len(x))
    x, y = ((x[order] / 16 - 0.3) @ random.normal(size=(64, 1000)) / 8).astype("float32"), y[order]
    layers = [keras.layers.Dense(4500, "relu"), keras.layers.Dense(4500, "relu"), keras.layers.Dense(10)]
    model = lambda: keras.Sequential([keras.Input((1000,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:]), 16, model, lambda: keras.optimizers.SGD(0.02), loss

def words(length=20, rows=20, vocabulary=10000):
    import collections, glob, os, re
    files = sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py"))
    text = re.findall(r"\\w+|[^\\w\\s]", "".join(open(file, errors="ignore").read() for file in files))
    known = {word: i + 1 for i, (word, _) in enumerate(collections.Counter(text).most_common(vocabulary - 1))}
    data = np.array([known.get(word, 0) for word in text], "int32")
    data = data[: len(data) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    data = data[random.permutation(len(data))]
    held, data = data[:400], data[400:]
    layers = [keras.layers.Embedding(vocabulary, 200), keras.layers.LSTM(200, return_sequences=True),
              keras.layers.LSTM(200, return_sequences=True), keras.layers.Dense(vocabulary)]
    model = lambda: keras.Sequential([keras.Input((length,), dtype="int32"), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    cut = lambda part: (part[:, :-1], part[:, 1:])
    return cut(data), cut(held), rows * workers, model, lambda: keras.optimizers.SGD(1.0, clipnorm=5.0), loss

data, held, batch, make, optimizer, loss = {"wide": wide, "words": words}[task]()
with strategy.scope():
    model = make()
    model.compile(optimizer(), loss)

class Watch(keras.callbacks.Callback):
    seconds, processor, found = [], [], []
    def on_epoch_begin(self, epoch, logs=None):
        self.now, self.used = time.perf_counter(), time.process_time()
    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.now)
        self.processor.append(time.process_time() - self.used)
        self.now, self.used = time.perf_counter(), time.process_time()
    def on_epoch_end(self, epoch, logs=None):
        # All workers have the same weights here, and look at them for themselves.
        of_parts = [float(tf.reduce_mean(self.loss(y, self.model(x)))) for x, y in self.parts]
        self.found.append([(epoch + 1) * look, float(np.mean(of_parts))])
        if self.found[-1][1] <= target:
            self.model.stop_training = True

watch, timer = Watch(), tfdistkit.callbacks.StepTimer(verbose=0)
watch.loss = loss
watch.parts = [(held[0][i:i + 64], held[1][i:i + 64]) for i in range(0, len(held[0]), 64)]
rows = tf.data.Dataset.from_tensor_slices(data).repeat().batch(batch, drop_remainder=True)
model.fit(rows, epochs=steps // look, steps_per_epoch=look, verbose=0, callbacks=[timer, watch])
if tfdistkit.rank() == 0 or is_alone:
    sent = timer.model.history.history.get("bytes_per_step", [0.0])[-1]
    found = {"seconds": watch.seconds, "processor": watch.processor, "losses": watch.found, "bytes": sent}
    print("found " + json.dumps(found), flush=True)
"""
# Name -> what sums gradients, the optimizer, the steps of an epoch, and the goal for the share of the bytes.
_BYTES: dict[str, tuple[str, str, int, float | None]] = {
    "none": ("Average()", "SGD(0.01)", 50, None),
    "FP16()": ("c.FP16()", "SGD(0.01)", 50, 0.51),
    "ByteGrad()": ("c.ByteGrad()", "SGD(0.01)", 50, 0.27),
    "PowerSGD(2)": ("c.PowerSGD(2)", "SGD(0.01)", 50, 0.05),
    "TopK(0.01)": ("c.TopK(0.01)", "SGD(0.01)", 50, 0.03),
    "OneBitAdam": ("Average()", "c.OneBitAdam(1e-4, freeze_after=10)", 50, 0.05),
    "LocalSGD(10)": ("a.LocalSGD(10)", "SGD(0.01)", 200, 1.05 / 10),
    "LocalSGD(100)": ("a.LocalSGD(100)", "SGD(0.01)", 500, 1.05 / 100),
    "DiLoCo(500)": ("a.DiLoCo(500)", "SGD(0.01)", 1000, 1 / 400),
    "DiLoCo(500), AdamW": ("a.DiLoCo(500)", "AdamW(1e-4)", 1000, 1 / 400),
}
_BYTES_SCRIPT = """
import json, sys
import tfdistkit
from tfdistkit import algorithms as a, compression as c
from tfdistkit.communication import Average
strategy = tfdistkit.strategy("multiworker")
import keras, numpy as np
from keras.optimizers import SGD, AdamW

def of_interface():
    with open("/proc/net/dev") as file:
        [line] = [line for line in file if line.strip().startswith("eth0:")]
    numbers = line.partition(":")[2].split()
    return int(numbers[0]) + int(numbers[8])

class Bytes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        tfdistkit.collectives.barrier()
        self.begin = of_interface()
    def on_epoch_end(self, epoch, logs=None):
        tfdistkit.collectives.barrier()
        self.each = (of_interface() - self.begin) / self.params["steps"]

for name, (reducer, optimizer, steps, _) in json.loads(sys.argv[1]).items():
    keras.utils.set_random_seed(0)
    with strategy.scope():
        strategy.reducer = eval(reducer)
        layers = [keras.layers.Dense(1000, "relu"), keras.layers.Dense(500, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((500,)), *layers])
        model.compile(eval(optimizer), "mse")
    x = np.random.default_rng(0).normal(size=(4 * steps, 500)).astype("float32")
    counted = Bytes()
    model.fit(x, x[:, :10], batch_size=4, epochs=2, verbose=0, callbacks=[counted])
    if tfdistkit.rank() == 0:
        print("found " + json.dumps([name, counted.each, 4 * model.count_params()]), flush=True)
"""
_DEADLINE_S = 1500
# Steps of `words`, without the traced ones.
_FEW = 16
_PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
_QUIET = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(_PATHS)}
_ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}


def command(hosts: NetHosts, names: str, task: str, options: str, look: int, steps: int, target: float) -> list[str]:
    """Returns the command that trains on hosts."""
    given = [word for name, value in {**_QUIET, **_ONE_THREAD}.items() for word in ("-x", f"{name}={value}")]
    words = ["run", "-H", names, *given, "--start-timeout", "120", str(hosts.work / "train.py")]
    return hosts.command(0, sys.executable, "-m", "tfdistkit", *words, task, options, *map(str, (look, steps, target)))


def found_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for a job; returns what its chief found."""
    try:
        out, error = process.communicate(timeout=_DEADLINE_S)
    except BaseException:
        process.kill()
        raise
    lines = [line for line in out.splitlines() if "found {" in line]
    if process.returncode or not lines:
        raise SystemExit(f"failed: {out}\n{error}")
    found: dict[str, Any] = json.loads(lines[0][lines[0].index("{") :])
    return found


def train(*arguments: Any) -> dict[str, Any]:
    """Trains on hosts; the arguments are those of `command`."""
    words = command(*arguments)
    return found_by(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


def step_s(seconds: list[float], rest: int = 4) -> float:
    """Returns the mean seconds of a step, the first ones left out, in which TensorFlow traces it."""
    return statistics.fmean(seconds[rest:])


def shape(hosts: NetHosts, rate: str | None) -> None:
    for number in hosts.numbers:
        hosts.shape(number, rate)


def wide(hosts: NetHosts, rate: str, names: list[str], steps: int, save: Path | None) -> None:
    """Prints the time to the loss that `none` has after `steps` steps."""
    bytes_per_s = rate_of(rate)
    shape(hosts, rate)
    none = train(hosts, "h1,h2", "wide", "{}", 8, 8, -1.0)
    none_s, none_link_s = step_s(none["seconds"], 2), none["bytes"] / bytes_per_s
    alone = train(hosts, "h1", "wide", "'alone'", 20, steps, -1.0)
    target = alone["losses"][-1][1]
    curves = {"none": [[at * none_link_s, loss] for at, loss in alone["losses"]]}
    print(
        f"loss {target:.4f} at {rate}: none {steps} steps of {none_s:.3f} s, {none_link_s:.3f} s of them on the link "
        f"(one process: {step_s(alone['seconds']):.3f} s a step, {step_s(alone['processor']):.3f} s of a processor)",
        flush=True,
    )
    for name in names:
        options, look = _WIDE[name]
        found = train(hosts, "h1,h2", "wide", options, look, 3 * steps, target)
        each, processor, (taken, loss) = step_s(found["seconds"]), step_s(found["processor"]), found["losses"][-1]
        quiet = processor + found["bytes"] / bytes_per_s
        curves[name] = [[at * quiet, loss] for at, loss in found["losses"]]
        factors = steps * none_s / (taken * each), steps * none_link_s / (taken * quiet)
        print(
            f"{name:<16} {taken} steps, loss {loss:.4f}{'' if loss <= target else ' (not reached)'}: "
            f"{each:.3f} s a step, {factors[0]:.1f} times as fast; {processor:.3f} s of a processor "
            f"and {found['bytes'] / 1e6:.2f} MB, {factors[1]:.1f} times as fast",
            flush=True,
        )
        if save is not None:
            save.write_text(json.dumps({"rate": rate, "target": target, "curves": curves}))


def words(hosts: NetHosts, rate: str, rounds: int, steps: int) -> None:
    """Prints the speed of two hosts over that of one, and what they learn in `steps` steps."""
    bytes_per_s = rate_of(rate)
    shape(hosts, rate)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        alone = train(hosts, "h1", "words", "'alone'", _FEW, _FEW, -1.0)
        jobs = [command(hosts, name, "words", "'alone'", _FEW, _FEW, -1.0) for name in ("h1", "h2")]
        both = [subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for job in jobs]
        apart = [found_by(one) for one in both]
        sync = train(hosts, "h1,h2", "words", "{}", _FEW, _FEW, -1.0)
        local = train(hosts, "h1,h2", "words", "{'algorithm': a.LocalSGD(100)}", _FEW, _FEW, -1.0)
        # Each of these few steps is local; the average at their end is that of a hundred.
        local["bytes"] *= _FEW / 100
        one_s, one_processor_s = step_s(alone["seconds"]), step_s(alone["processor"])
        speeds = {"apart": sum(one_s / step_s(one["seconds"]) for one in apart)}
        for name, job in {"sync": sync, "LocalSGD(100)": local}.items():
            link_s = job["bytes"] / bytes_per_s
            speeds[name] = 2 * one_s / (step_s(job["seconds"]) + (link_s if job is local else 0))
            speeds[f"{name}, of processors and link"] = 2 * one_processor_s / (step_s(job["processor"]) + link_s)
        for name, speed in speeds.items():
            found.setdefault(name, []).append(speed)
        print("  ".join(f"{name} {speed:.2f}" for name, speed in speeds.items()), flush=True)
        print(f"  a step: {one_processor_s:.3f} s of a processor, {sync['bytes'] / 1e6:.1f} MB", flush=True)
    print("two hosts over one, medians: " + "; ".join(f"{n} {statistics.median(s):.2f}" for n, s in found.items()))
    if steps:
        for name, options in {"sync": "{}", "LocalSGD(100)": "{'algorithm': a.LocalSGD(100)}"}.items():
            at, loss = train(hosts, "h1,h2", "words", options, 100, steps, -1.0)["losses"][-1]
            print(f"{name}: loss {loss:.4f} after {at} steps", flush=True)


def count_bytes(hosts: NetHosts, names: list[str]) -> None:
    """Prints the bytes of a step with each way to send."""
    hosts.write("bytes.py", _BYTES_SCRIPT)
    shape(hosts, None)
    chosen = {name: _BYTES[name] for name in dict.fromkeys(["none", *names])}
    given = [word for name, value in {**_QUIET, **_ONE_THREAD}.items() for word in ("-x", f"{name}={value}")]
    words = ["run", "-H", "h1,h2", *given, "--start-timeout", "120", str(hosts.work / "bytes.py"), json.dumps(chosen)]
    job = hosts.command(0, sys.executable, "-m", "tfdistkit", *words)
    done = subprocess.run(job, capture_output=True, text=True, timeout=_DEADLINE_S)
    if done.returncode:
        raise SystemExit(f"failed: {done.stdout}\n{done.stderr}")
    whole = 0.0
    for line in (line for line in done.stdout.splitlines() if "found [" in line):
        name, size, of_weights = json.loads(line[line.index("[", line.index("found")) :])
        whole, goal = whole or size, _BYTES[name][3]
        wanted = "" if goal is None else f" (goal {goal:.5f}: {'met' if size / whole <= goal else 'missed'})"
        print(f"{name:<20} {size / 1e6:9.4f} MB a step, of none {size / whole:.5f}{wanted}, "
              f"of the weights {size / of_weights:.5f}", flush=True)  # fmt: skip


def rate_of(rate: str) -> float:
    """Returns the bytes in a second of a rate as `tc` writes it."""
    return float(rate[:-4]) * {"gbit": 1e9, "mbit": 1e6}[rate[-4:]] / 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["wide", "words", "bytes"])
    parser.add_argument("--rate", help="rate of the link in the syntax of `tc` (default: 100mbit for wide, else 1gbit)")
    parser.add_argument("--steps", type=int, help="steps of none for wide, of both for the loss of words")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of words")
    parser.add_argument("--only", nargs="+", help="names of wide or bytes. Default: all")
    parser.add_argument("--save", type=Path, help="a file for the losses over time of wide, which pictures.py draws")
    args = parser.parse_args()
    known = [name for name in (_BYTES if args.task == "bytes" else _WIDE) if name != "none"]
    if unknown := [name for name in args.only or [] if name not in known]:
        parser.error(f"--only: {', '.join(unknown)}; known are {', '.join(known)}")
    if why_no_hosts():
        raise SystemExit(f"cannot create hosts: {why_no_hosts()}")
    with tempfile.TemporaryDirectory() as folder, net_hosts(Path(folder, "net"), 2) as hosts:
        hosts.write("train.py", _SCRIPT)
        if args.task == "bytes":
            count_bytes(hosts, args.only or known)
        elif args.task == "wide":
            wide(hosts, args.rate or "100mbit", args.only or known, args.steps or 160, args.save)
        else:
            words(hosts, args.rate or "1gbit", args.rounds, 1000 if args.steps is None else args.steps)


if __name__ == "__main__":
    main()
