"""How long after the hang timeout a hang is explained and the job has ended: planted hangs of two ranks that train.

Measures from the last move of the job (the last change of the progress notes of a rank) to the report, and to the end
of the launcher, and prints the first lines of the report. Goal: a report within the hang timeout plus 5 s. A FUSE file
system that never answers stands for a dead NFS; it needs root and /dev/fuse.
Run: python benchmarks/hangs.py [--hang-timeout 8]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "parallel"))
from dead_disk import dead_disk, why_no_fuse
from job_process import Job, wait_until, write_script

from tfdistkit.report.events import read_events
from tfdistkit.report.hangs.layout import read_notes

_TRAIN = """
import os, pathlib, sys, time
import keras, numpy as np, tensorflow as tf
import tfdistkit

hang, disk = sys.argv[1], sys.argv[2]
strategy = tfdistkit.strategy("multiworker")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Hang(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch != 1:
            return
        pathlib.Path(f"begun.{tfdistkit.rank()}").write_text(str(os.getpid()))
        if hang == "callback" and tfdistkit.rank() == 1:
            time.sleep(1000)
        if hang == "skipped collective" and tfdistkit.rank() == 0:
            tfdistkit.collectives.all_reduce(tf.ones(3))
        if hang == "dead disk":
            open(disk + "/train.csv").read()


def rows():
    for number in range(64):
        if hang == "input" and number == 40:
            time.sleep(1000)
        time.sleep(0.005)
        yield np.ones(4), np.ones(1)


spec = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))
data = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(8)
model.fit(data, epochs=3 if hang != "suspended" else 1000, verbose=0, callbacks=[Hang()])
"""
_HANGS = ("callback", "skipped collective", "input", "suspended", "dead disk")


def planted(hang: str, timeout_s: float, folder: Path) -> tuple[float, float, list[str]]:
    """Returns the seconds from the last move to the report, those to the end of the launcher, and the report.

    Both are 0 for an error without a hang.
    """
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(dead_disk(folder / "disk")) if hang == "dead disk" else folder
        words = ("-np", "2", "--log-dir", "logs", "--hang-timeout", f"{timeout_s:g}", write_script(folder, _TRAIN))
        variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        job = Job(*words, hang, str(disk), cwd=folder, **variables)
        try:
            if hang == "suspended":
                wait_until(lambda: (folder / "begun.1").exists() and bool((folder / "begun.1").read_text()), "training")
                os.kill(int((folder / "begun.1").read_text()), signal.SIGSTOP)
            ended = job.end(timeout_s + 90)
            end = time.monotonic()
            events = [one for one in read_events(folder / "logs") if one["event"] == "hang"]
            if not events:  # Before the hang timeout: ranks that meet in different collectives get an error.
                error = ended.stderr.partition("errors_impl.")[2].splitlines()[0]
                return 0.0, 0.0, [error]
            [event] = events
            found = [read_notes(folder / f"logs/rank.{rank}") for rank in range(2)]
            moved = max(notes.since for notes in found if notes is not None)
            reported = event["time"] - time.time() + time.monotonic()
            assert ended.code == 1, ended.stderr
            return reported - moved, end - moved, event["places"]
        finally:
            stack.close()  # Only then can ranks end that the disk blocks.
            job.sweep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hang-timeout", type=float, default=8.0)
    timeout_s = parser.parse_args().hang_timeout
    for hang in _HANGS:
        if hang == "dead disk" and why_no_fuse():
            print(f"{hang}: not measured: {why_no_fuse()}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            report_s, end_s, places = planted(hang, timeout_s, Path(folder))
        after = f"reported {report_s - timeout_s:+.1f} s after the timeout, ended {end_s - timeout_s:+.1f} s"
        print(f"{hang:<19} {after if report_s else 'an error at once'}")
        for line in places:
            print(f"    {line}")


if __name__ == "__main__":
    main()
