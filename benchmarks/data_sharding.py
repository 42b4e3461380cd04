"""Memory and bytes of an epoch over TFRecords written by `tfdistkit data write`: tfdistkit.data against plain tf.data.

Each variant reads one epoch in a separate process, over a small and a large data set. Prints the peak memory above the
process with TensorFlow loaded, the bytes read (/proc/self/io), and the time.
Run: python benchmarks/data_sharding.py [--gigabytes 2] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROW_BYTES = 16384
_FILES = 8
_BUFFER = 1000
_BATCH = 64
# Size of the small data set, as a fraction of the large one.
_SMALL = 0.25


def plain(folder: Path) -> Any:
    """Returns the pipeline of the tf.data guides: interleaves shuffled files, and shuffles elements in a buffer."""
    import tensorflow as tf

    files = tf.data.Dataset.list_files(str(folder / "*.tfrecord"), seed=1)
    return files.interleave(tf.data.TFRecordDataset, cycle_length=_FILES).shuffle(_BUFFER, seed=1)


def plain_parallel(folder: Path) -> Any:
    """Returns the same pipeline with parallel reads (AUTOTUNE)."""
    import tensorflow as tf

    files = tf.data.Dataset.list_files(str(folder / "*.tfrecord"), seed=1)
    read = files.interleave(tf.data.TFRecordDataset, cycle_length=_FILES, num_parallel_calls=tf.data.AUTOTUNE)
    return read.shuffle(_BUFFER, seed=1)


def ours(**options: Any) -> Callable[[Path], Any]:
    """Returns a function that calls `from_files` with options."""

    def make(folder: Path) -> Any:
        import tensorflow as tf

        import tfdistkit

        return tfdistkit.data.from_files(
            folder, tf.data.TFRecordDataset, shuffle=True, seed=1, buffer_size=_BUFFER, **options
        )

    return make


def sharded(policy: str) -> Callable[[Path], Any]:
    """Returns a function that takes the first of two parts of plain tf.data with `shard`."""

    def make(folder: Path) -> Any:
        import tfdistkit

        return tfdistkit.data.shard(plain(folder), policy, num_shards=2, index=0)

    return make


VARIANTS: dict[str, Callable[[Path], Any]] = {
    "plain tf.data, 1 worker": plain,
    "plain tf.data, parallel, 1 worker": plain_parallel,
    "from_files, 1 worker": ours(),
    "from_files, file, rank 0 of 2": ours(policy="file", num_shards=2, index=0),
    "from_files, file, rank 1 of 2": ours(policy="file", num_shards=2, index=1),
    "from_files, element, rank 0 of 2": ours(policy="element", num_shards=2, index=0),
    "from_files, seed, rank 0 of 2": ours(policy="seed", num_shards=2, index=0),
    "shard of plain, element, rank 0 of 2": sharded("element"),
    "shard of plain, file, rank 0 of 2": sharded("file"),
}


def bytes_read() -> int:
    """Returns the bytes that this process has read so far, also from the page cache."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def peak_mb() -> float:
    """Returns the peak memory of this process in MB (getrusage would count its parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)["VmHWM"].split()[0]) / 1024


def measure(name: str, folder: Path) -> dict[str, float]:
    """Reads one epoch of a variant in this process, and returns its measurements."""
    import tensorflow as tf

    list(tf.data.Dataset.range(4).shuffle(4).batch(2))  # allocates the memory of the first dataset of a process
    memory, read, start = peak_mb(), bytes_read(), time.perf_counter()
    rows = 0
    for batch in VARIANTS[name](folder).batch(_BATCH).prefetch(2):
        rows += int(batch.shape[0])
    seconds = time.perf_counter() - start
    return {"rows": rows, "memory_mb": peak_mb() - memory, "read_bytes": bytes_read() - read, "seconds": seconds}


def in_process(name: str, folder: Path) -> dict[str, float]:
    """Runs `measure` in a separate process."""
    command = [sys.executable, __file__, "--variant", name, "--folder", str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def write(folder: Path, gigabytes: float) -> Path:
    """Writes random rows with `tfdistkit data write`."""
    import numpy as np

    rows = int(gigabytes * 1e9) // _ROW_BYTES
    source = folder / f"{gigabytes:g}.npy"
    array = np.lib.format.open_memmap(source, mode="w+", dtype="uint8", shape=(rows, _ROW_BYTES))
    random = np.random.default_rng(0)
    for first in range(0, rows, 4096):
        array[first : first + 4096] = random.integers(0, 256, array[first : first + 4096].shape, dtype="uint8")
    array.flush()
    out = folder / f"{gigabytes:g}"
    start = time.perf_counter()
    command = [sys.executable, "-m", "tfdistkit", "data", "write", str(source), str(out), "--shards", str(_FILES)]
    subprocess.run(command, check=True, timeout=1800, stderr=subprocess.DEVNULL)
    print(f"{gigabytes:g} GB, {rows} rows, written and verified in {time.perf_counter() - start:.0f} s", flush=True)
    source.unlink()
    return out


def compare(folder: Path, gigabytes: float) -> None:
    """Writes both data sets, and prints a line for each variant."""
    small, large = (write(folder, size) for size in (gigabytes * _SMALL, gigabytes))
    size = sum(path.stat().st_size for path in large.glob("*.tfrecord"))
    print(f"{'':<38}{'MB, small':>12}{'MB, large':>12}{'bytes read':>12}{'seconds':>10}{'rows':>10}")
    for name in VARIANTS:
        one, two = in_process(name, small), in_process(name, large)
        share = two["read_bytes"] / size
        print(
            f"{name:<38}{one['memory_mb']:>12.0f}{two['memory_mb']:>12.0f}{share:>12.3f}{two['seconds']:>10.1f}"
            f"{two['rows']:>10.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the large data set")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.folder)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        compare(Path(folder), options.gigabytes)


if __name__ == "__main__":
    main()
