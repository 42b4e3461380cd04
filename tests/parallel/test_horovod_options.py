"""Options of `tfdistkit.strategy("horovod", ...)`: each reaches Horovod, and has its effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.horovod]

ROWS, WORDS, LENGTH, WIDTH = 8, 6, 3, 2

# No fusion, and a slow cycle. Over MPI, Horovod's defaults, and its autotuning.
OVER_GLOO = """
    import pathlib, tfdistkit
    strategy = tfdistkit.strategy("horovod", fusion_threshold_bytes=0, cycle_time_ms=30, hierarchical=True,
                                  timeline=pathlib.Path("timeline.json"), timeout_s=90.4)
"""
OVER_MPI = """
    import pathlib, tfdistkit
    strategy = tfdistkit.strategy("horovod", autotune=True, timeline="timeline.json")
"""
LOG = {"HOROVOD_AUTOTUNE_LOG": "log"}
IN_SETS = """
    import tfdistkit
    of_set = tfdistkit.strategy("horovod", process_set=[[2, 0], [1]], timeout_s=100)
    strategy = tfdistkit.strategy("horovod")
"""

over_gloo = pytest.mark.parametrize("engine", ["horovod"])
over_mpi = pytest.mark.parametrize("engine", ["horovod_mpi"])

# One step of plain gradient descent on a table of words and a matrix: the change is the gradient.
DATA = f"""
    import json
    import keras, numpy as np
    import horovod.tensorflow as hvd

    def data(seed):
        numbers = np.random.default_rng(seed)
        return (numbers.integers(0, {WORDS}, size=({ROWS}, {LENGTH})), numbers.normal(size=({ROWS}, 1)),
                numbers.normal(size=({WORDS}, {WIDTH})), numbers.normal(size=({WIDTH}, 1)))
"""
STEP = """
    def gradients(strategy, seed=0):
        x, y, table, matrix = data(seed)
        with strategy.scope():
            layers = [keras.layers.Embedding(*table.shape), keras.layers.GlobalAveragePooling1D()]
            model = keras.Sequential([keras.Input(x.shape[1:]), *layers, keras.layers.Dense(1, use_bias=False)])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        model.set_weights([table, matrix])
        model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
        return [(before - after).tolist() for before, after in zip((table, matrix), model.get_weights())]
"""
EACH = (
    DATA
    + STEP
    + """
    gathers, all_gather = [], hvd.allgather
    def spy(*args, **kwargs):
        gathers.append(1)
        return all_gather(*args, **kwargs)
    hvd.allgather = spy
    for op, compression, as_dense in WANTED:
        one = tfdistkit.strategy("horovod", op=op, compression=compression, sparse_as_dense=as_dense)
        gathers.clear()
        found = gradients(one)
        print(json.dumps([f"{op} {compression} {as_dense}", len(gathers), *found]))
    hvd.allgather = all_gather
"""
)
BOTH = [
    ("average", "none", False),
    ("average", "none", True),
    ("average", "fp16", False),
    ("average", "bf16", False),
    ("sum", "none", False),
    ("sum", "fp16", True),
]
OF_MPI = [("adasum", "none", False), ("adasum", "fp16", False)]


def made_up(seed: int) -> tuple[np.ndarray, ...]:
    """Returns the data of a step, as on the ranks."""
    names: dict[str, object] = {}
    source = DATA[DATA.index("def data") :].replace("\n    ", "\n")
    exec(f"import numpy as np\n{source}", names)
    found: tuple[np.ndarray, ...] = names["data"](seed)  # type: ignore[operator]
    return found


def parts_of_gradients(seed: int, replicas: int, scale: float = 1.0, rows_as: Any = float) -> list[list[np.ndarray]]:
    """By NumPy: each replica's part of the gradient of the mean over all rows, of the table and of the matrix."""
    x, y, table, matrix = made_up(seed)
    parts = []
    for rows in np.array_split(np.arange(ROWS), replicas):
        pooled = table[x[rows]].mean(1)
        by_output = scale * 2 * (pooled @ matrix - y[rows]) / ROWS
        of_table = np.zeros_like(table)
        np.add.at(of_table, x[rows], rounded(by_output @ matrix.T / LENGTH, rows_as)[:, None])
        parts.append([of_table, pooled.T @ by_output])
    return parts


def rounded(numbers: np.ndarray, kind: Any) -> np.ndarray:
    return numbers.astype(np.float32).astype(kind).astype(np.float64)


def combined(op: str, compression: str, as_dense: bool) -> list[np.ndarray]:
    """Returns the expected combination of the parts of two ranks."""
    is_sparse = not as_dense and op != "adasum"
    kind = {"none": np.float64, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[compression]
    # The rows of a table are gathered, and never sent as bfloat16.
    rows_as = np.float16 if compression == "fp16" and is_sparse else np.float64
    parts = parts_of_gradients(0, 2, 1.0 if op == "average" else 2.0, rows_as)
    results = []
    for sparse, (one, other) in zip((is_sparse, False), zip(*parts)):
        if sparse:
            results.append(one + other)
            continue
        one, other = rounded(one, kind), rounded(other, kind)
        if op == "adasum":
            dot = (one * other).sum()
            results.append((1 - dot / (2 * (one**2).sum())) * one + (1 - dot / (2 * (other**2).sum())) * other)
        else:
            results.append(rounded(one + other, kind))
    return results


def test_the_expected_results_of_options_differ() -> None:
    """The options have a measurable effect on this data."""
    exact = combined("average", "none", False)
    for others in (("average", "fp16", True), ("average", "bf16", True), ("sum", "none", False)):
        assert all(np.abs(one - other).max() > 1e-5 for one, other in zip(exact, combined(*others)))


def check(printed: list[str], wanted: list[tuple[str, str, bool]]) -> None:
    for text in printed:
        rows = {row[0]: row[1:] for row in map(json.loads, text.splitlines())}
        assert list(rows) == [f"{op} {compression} {as_dense}" for op, compression, as_dense in wanted]
        for op, compression, as_dense in wanted:
            gathers, *found = rows[f"{op} {compression} {as_dense}"]
            for got, expected in zip(found, combined(op, compression, as_dense), strict=True):
                # Adasum rounds to float16 at other points than `combined`.
                rounding = 2**-10 if (op, compression) == ("adasum", "fp16") else 0.0
                np.testing.assert_allclose(got, expected, rtol=rounding, atol=2e-6, err_msg=f"{op} {compression}")
            # The table's rows and their indices are sent separately, unless they are dense.
            dense = as_dense or op == "adasum"
            assert (gathers > 0) == (not dense or compression == "bf16")


@pytest.mark.part(EACH.replace("WANTED", repr(BOTH)), setup=OVER_GLOO)
@over_gloo
def test_gradients_over_gloo(printed: list[str]) -> None:
    check(printed, BOTH)


@pytest.mark.part(EACH.replace("WANTED", repr(BOTH + OF_MPI)), setup=OVER_MPI, variables=LOG)
@over_mpi
def test_gradients_over_mpi(printed: list[str]) -> None:
    check(printed, BOTH + OF_MPI)


SWITCHES = """
    import json, os
    print(json.dumps({name: os.environ.get(f"HOROVOD_{name}") for name in WANTED}))
    print(pathlib.Path.cwd())
"""
SET_OVER_GLOO = {
    "FUSION_THRESHOLD": "0",
    "CYCLE_TIME": "30",
    "HIERARCHICAL_ALLREDUCE": "1",
    "GLOO_TIMEOUT_SECONDS": "90",
    "AUTOTUNE": None,
}
SET_OVER_MPI = {"FUSION_THRESHOLD": None, "CYCLE_TIME": None, "HIERARCHICAL_ALLREDUCE": None, "AUTOTUNE": "1"}


@pytest.mark.part(SWITCHES.replace("WANTED", repr(list(SET_OVER_GLOO))), setup=OVER_GLOO)
@over_gloo
def test_switches_over_gloo(printed: list[str]) -> None:
    for text in printed:
        variables, folder = text.splitlines()
        assert json.loads(variables) == SET_OVER_GLOO
        timeline = Path(folder, "timeline.json").read_text()
        assert "tfdistkit_all_reduce_0" in timeline and "GLOO_ALLREDUCE" in timeline
        # Each tensor by itself: no fusion.
        assert "MEMCPY_IN_FUSION_BUFFER" not in timeline


@pytest.mark.part(SWITCHES.replace("WANTED", repr(list(SET_OVER_MPI))), setup=OVER_MPI, variables=LOG)
@over_mpi
def test_switches_over_mpi(printed: list[str]) -> None:
    for text in printed:
        variables, folder = text.splitlines()
        assert json.loads(variables) == SET_OVER_MPI
        timeline = Path(folder, "timeline.json").read_text()
        assert "MPI_ALLREDUCE" in timeline and "MEMCPY_IN_FUSION_BUFFER" in timeline
        # Horovod writes it only with autotuning.
        assert "cycle_time_ms" in Path(folder, "log").read_text()


CYCLES = """
    import time
    import tensorflow as tf
    from tfdistkit import collectives as c
    c.check(False)
    c.barrier()
    started = time.monotonic()
    for _ in range(10):
        assert float(c.all_reduce(1.0)) == 2.0
    c.check(None)
    print(time.monotonic() - started)
"""


@pytest.mark.part(CYCLES, setup=OVER_GLOO)
@over_gloo
def test_the_cycle_time_is_that_of_the_option(printed: list[str]) -> None:
    # Each begins after the one before, and waits for the next cycle.
    assert all(float(text) > 9 * 0.030 for text in printed)


WRONG = """
    import json
    from tfdistkit.algorithms import Hierarchical, LocalSGD
    from tfdistkit.compression import FP16, PowerSGD
    inf = float("inf")
    for options in WANTED:
        try:
            tfdistkit.strategy("horovod", **options)
        except Exception as error:
            print(json.dumps([type(error).__name__, str(error)]))
        else:
            print(json.dumps(["", f"no error for {options}"]))
"""


class Code(str):
    """What the script of the ranks evaluates."""

    def __repr__(self) -> str:
        return str(self)


WRONG_VALUES = [
    ({"op": "averge"}, "OptionError", "Did you mean 'average'?"),
    ({"op": "min"}, "OptionError", "one of: average, sum, adasum"),
    ({"compression": "fp8"}, "OptionError", "one of: none, fp16, bf16"),
    ({"sparse_as_dense": "yes"}, "OptionError", "sparse_as_dense='yes'"),
    ({"fusion_threshold_bytes": -1}, "OptionError", "must be an integer >= 0"),
    ({"fusion_threshold_bytes": 1.5}, "OptionError", "fusion_threshold_bytes=1.5"),
    ({"cycle_time_ms": 0}, "OptionError", "must be a positive number of milliseconds"),
    ({"cycle_time_ms": "5"}, "OptionError", "cycle_time_ms='5'"),
    ({"timeout_s": float("inf")}, "OptionError", "must be a positive number of seconds"),
    ({"hierarchical": 1}, "OptionError", "True or False"),
    ({"autotune": "on"}, "OptionError", "True or False"),
    ({"process_set": [0, 2]}, "OptionError", "ranks from 0 to 1"),
    ({"process_set": [[0], [0, 1]]}, "OptionError", "each rank at most once"),
    ({"process_set": []}, "OptionError", "process_set=[]"),
    ({"process_set": "all"}, "OptionError", "process_set='all'"),
    ({"op": "adasum", "compression": "bf16"}, "OptionError", "Horovod's Adasum has no bfloat16"),
    ({"op": "adasum", "compression": Code("PowerSGD(2)")}, "OptionError", "and no other compression"),
    ({"op": "sum", "algorithm": Code("LocalSGD()")}, "OptionError", '`op` must be "average" with `algorithm`'),
    ({"reducer": Code("FP16()"), "compression": "fp16"}, "OptionError", "reducer=FP16"),
    ({"algorithm": Code("Hierarchical()")}, "UnsupportedError", "for the strategy 'horovod'"),
    # Valid values, but given too late or unsupported here.
    ({"cycle_time_ms": 5}, "TooLateError", "HOROVOD_CYCLE_TIME"),
    ({"process_set": [0]}, "TooLateError", "process_set=[[0]]"),
    ({"op": "adasum"}, "UnsupportedError", "2 ranks, over Gloo"),
]


@pytest.mark.part(WRONG.replace("WANTED", repr([options for options, *_ in WRONG_VALUES])), setup=OVER_GLOO)
@over_gloo
@pytest.mark.parametrize("number", range(len(WRONG_VALUES)), ids=lambda number: str(WRONG_VALUES[number][0]))
def test_wrong_values_are_errors(printed: list[str], number: int) -> None:
    _, kind, words = WRONG_VALUES[number]
    for text in printed:
        name, message = json.loads(text.splitlines()[number])
        assert name == kind, message
        assert words in message and "Received: " in message


UNWRITABLE = """
    try:
        tfdistkit.strategy("horovod", timeline="no/such/folder/timeline.json")
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.part(UNWRITABLE, setup=OVER_GLOO)
@over_gloo
def test_an_unwritable_timeline_is_an_error(printed: list[str]) -> None:
    assert "OptionError `timeline` must be a file in an existing folder" in printed[0]
    assert "TooLateError" in printed[1]  # Rank 0 writes the file, which may be on another machine.


TRAIN_IN_SETS = (
    DATA
    + STEP
    + """
    print(json.dumps([of_set.num_replicas_in_sync, *gradients(of_set, seed=int(rank == 1))]))
    print(json.dumps([strategy.num_replicas_in_sync, *gradients(strategy, seed=2)]))
"""
)
in_sets = pytest.mark.parametrize(("engine", "world_size"), [("horovod", 3)])
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


@pytest.mark.part(TRAIN_IN_SETS, setup=IN_SETS, variables=DYNAMIC)
@in_sets
def test_process_sets_train_separately(printed: list[str]) -> None:
    for rank, text in enumerate(printed):
        expected = [(1, 1) if rank == 1 else (2, 0), (3, 2)]
        for line, (replicas, seed) in zip(text.splitlines(), expected, strict=True):
            found_replicas, *found = json.loads(line)
            assert found_replicas == replicas
            for got, parts in zip(found, zip(*parts_of_gradients(seed, replicas)), strict=True):
                np.testing.assert_allclose(got, sum(parts), atol=2e-6)


# Made while the job runs, beside those made at its start.
SETS_OF_COLLECTIVES = """
    import tensorflow as tf
    from tfdistkit import collectives as c

    last, all_of_them = c.ProcessSet([2, 1]), c.ProcessSet(range(3))
    assert (last.ranks, last.size, last.included) == ((1, 2), 2, rank != 0)

    def work(x):
        results = []
        if last.included:
            results += [c.all_gather(x, process_set=last), c.all_reduce(x, "average", last), c.broadcast(x, 1, last)]
            results += [c.all_to_all(tf.repeat(x, 2, 0), process_set=last)]
        return [*results, c.all_reduce(x), c.all_gather(x, process_set=all_of_them)]

    x = tf.constant([[1.0 + rank]])
    graph = tf.function(work)
    for function in (work, graph, graph, graph, graph, work, work, work):
        *in_set, total, everybody = [t.numpy().ravel().tolist() for t in function(x)]
        assert total == [6.0] and everybody == [1.0, 2.0, 3.0]
        assert in_set == ([[2.0, 3.0], [2.5], [3.0], [2.0, 3.0]] if last.included else [])
    if last.included:
        assert c.broadcast_object(rank, 1, last) == 2
        c.barrier(process_set=last)
    for wrong in ([], [0, 0], [3], ["0"], [-1, 1], [True]):
        try:
            c.ProcessSet(wrong)
        except ValueError as error:
            assert "0 to 2" in str(error)
        else:
            raise AssertionError(wrong)
    c.barrier()
    print("sets work")
"""


@pytest.mark.part(SETS_OF_COLLECTIVES, setup=IN_SETS, variables=DYNAMIC)
@in_sets
def test_process_sets_of_collectives(printed: list[str]) -> None:
    assert printed == ["sets work\n"] * 3
