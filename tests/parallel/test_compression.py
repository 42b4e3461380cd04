"""What travels compressed between real processes: the sums, what waits for later steps, and what no rank may keep.

One job of each transport takes the same steps with every compression; its gradients are drawn here, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_jobs import RunRanks, runner

pytestmark = pytest.mark.tensorflow

STEPS, BROKEN = 8, 5
RATE, FREEZE = 0.1, 2
# One step is not finite on rank 1 alone.
SHAPES = {"kernel": (40, 24), "bias": (24,), "table": (6, 4)}

SCRIPT = """
    import json, sys
    import numpy as np
    import tfdistkit
    from tfdistkit import compression as c
    strategy = tfdistkit.strategy(sys.argv[1])
    import keras, tensorflow as tf

    COMPRESSIONS = {
        "none": None, "fp16": c.FP16(), "bf16": c.BF16(), "byte_grad": c.ByteGrad(block=64), "int8": c.Int8(block=64),
        "int8_nearest": c.Int8(block=64, stochastic=False), "sign": c.Sign(2, block=64),
        "top_k": c.TopK(0.1, min_size=100),
        "dgc": c.TopK(0.02, momentum=0.5, clip_norm=50.0, warmup_steps=4, min_size=100),
        "power_sgd": c.PowerSGD(2), "power_sgd_later": c.PowerSGD(2, start_after=3, warm_start=False),
        "where": c.Where(lambda variable: "kernel" in variable.path, c.PowerSGD(3), c.TopK(0.5, min_size=0)),
        "chain": c.Chain(c.PowerSGD(2), c.FP16()), "chain_of_small": c.Chain(c.PowerSGD(2), c.FP16()),
        "sign_default": c.Sign(1),
    }
    # What they do to gradients is theirs.
    OPTIMIZERS = {
        "one_bit_adam": lambda: c.OneBitAdam(RATE, freeze_after=FREEZE),
        "q_adam": lambda: c.QAdam(RATE, warmup_steps=FREEZE),
    }
    GRADIENTS
    rank = tfdistkit.rank()

    def rests(optimizer):
        found = {}
        for variable in optimizer.variables:
            if "rest" in variable.path:
                name = NAMES[[v.shape for v in variables].index(variable.shape)]
                found[name] = variable.numpy().tolist()
        return found

    printed = {}
    for name in (*COMPRESSIONS, *OPTIMIZERS):
        strategy.reducer = COMPRESSIONS.get(name) or tfdistkit.communication.Average()
        with strategy.scope():
            variables = [keras.Variable(np.zeros(SHAPES[one], "float32"), name=one) for one in NAMES]
            inner = OPTIMIZERS.get(name, lambda: keras.optimizers.SGD(1.0))()
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
            optimizer.build(variables)

        @tf.function
        def step(kernel, bias, rows):
            def in_replica():
                scale = tf.convert_to_tensor(optimizer.dynamic_scale) * (1e-4 if "small" in name else 1.0)
                table = tf.IndexedSlices(rows * scale, tf.constant([4, 1]), tf.constant(SHAPES["table"]))
                optimizer.apply([kernel * scale, bias * scale, table], variables)
            strategy.run(in_replica)

        trace = []
        for number in range(STEPS):
            drawn = gradients(number, rank)
            step(*[tf.constant(one) for one in drawn])
            trace.append({"weights": [v.numpy().tolist() for v in variables], "rests": rests(optimizer)})
        printed[name] = trace
    print(json.dumps(printed))
"""

DRAWING = f"""
    STEPS, BROKEN = {STEPS}, {BROKEN}
    RATE, FREEZE = {RATE}, {FREEZE}
    SHAPES = {SHAPES}
    NAMES = list(SHAPES)

    def gradients(step, rank):
        random = np.random.default_rng([step, rank])
        drawn = [random.normal(size=size).astype("float32") for size in (SHAPES["kernel"], SHAPES["bias"], (2, 4))]
        if step == BROKEN and rank == 1:
            drawn[0][3, 5] = np.inf
        return drawn
"""

drawing: dict[str, Any] = {"np": np}
exec("\n".join(line[4:] for line in DRAWING.splitlines()), drawing)  # The same code as on the ranks.

WITHOUT_STATE = {
    "none": 1e-6,
    "fp16": 2**-9,
    "bf16": 2**-6,
    "byte_grad": 0.05,
    "int8": 0.12,
    "int8_nearest": 0.06,
}
OPTIMIZERS = ("one_bit_adam", "q_adam")
WITH_FEEDBACK = ("sign", "top_k", "power_sgd", "power_sgd_later", "where", "chain")


def exact(step: int, ranks: int) -> list[np.ndarray]:
    """The sums of a step's gradients over the ranks: kernel, bias, table."""
    kernels, biases, rows = zip(*(drawing["gradients"](step, rank) for rank in range(ranks)))
    table: np.ndarray = np.zeros(SHAPES["table"], "float32")
    for own in rows:
        table[[4, 1]] += own
    return [sum(kernels), sum(biases), table]


Trace = dict[str, list[dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("multiworker", 2), id="shm"),
        pytest.param(("multiworker", 3), id="shm_3", marks=pytest.mark.thorough),
        pytest.param(("multiworker_ring", 2), id="ring", marks=pytest.mark.thorough),
        pytest.param(("multiworker_ring", 3), id="ring_3", marks=pytest.mark.thorough),
        pytest.param(("horovod", 2), id="horovod", marks=pytest.mark.horovod),
    ],
)
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """What each rank printed."""
    engine, ranks = request.param
    run: RunRanks = runner(request)
    code = SCRIPT.replace("    GRADIENTS\n", DRAWING)
    folder: Path = tmp_path_factory.mktemp("compression")
    return [json.loads(printed.splitlines()[-1]) for printed in run(engine, code, folder, ranks)]


def updates(trace: list[dict[str, Any]]) -> list[list[np.ndarray]]:
    """What each step took from the weights."""
    weights = [[np.array(one, "float32") for one in step["weights"]] for step in trace]
    before = [[np.zeros_like(one) for one in weights[0]], *weights]
    return [[old - new for old, new in zip(*pair)] for pair in zip(before, weights)]


def test_all_ranks_have_the_same_weights_bit_for_bit(traces: list[Trace]) -> None:
    for name, steps in traces[0].items():
        for other in traces[1:]:
            assert [step["weights"] for step in other[name]] == [step["weights"] for step in steps], name


@pytest.mark.parametrize("name", WITHOUT_STATE)
def test_sums_are_near_to_the_exact_ones(traces: list[Trace], name: str) -> None:
    for step, update in enumerate(updates(traces[0][name])):
        for found, expected in zip(update, exact(step, len(traces))):
            if step == BROKEN:
                expected = np.zeros_like(expected)
            # Weights of up to 10 are kept in float32.
            np.testing.assert_allclose(found, expected, atol=WITHOUT_STATE[name] * 4.0 + 1e-5, err_msg=f"step {step}")


def test_random_rounding_is_right_in_the_mean(traces: list[Trace]) -> None:
    found = np.concatenate([u[0].ravel() - exact(i, len(traces))[0].ravel()
                            for i, u in enumerate(updates(traces[0]["int8"])) if i != BROKEN])  # fmt: skip
    assert 1e-3 < np.abs(found).max() < 0.3 and abs(found.mean()) < 4 * found.std() / found.size**0.5


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_what_is_not_sent_is_kept(traces: list[Trace], name: str) -> None:
    total = [np.zeros(shape) for shape in SHAPES.values()]
    for step in range(STEPS):
        if step != BROKEN:
            total = [one + more for one, more in zip(total, exact(step, len(traces)))]
        taken = [-np.array(one) for one in traces[0][name][step]["weights"]]
        for place, variable in enumerate(SHAPES):
            kept = sum(np.array(trace[name][step]["rests"].get(variable, 0.0)) for trace in traces)
            atol = 0.02 if name == "chain" else 2e-4
            np.testing.assert_allclose(taken[place] + kept, total[place], atol=atol, err_msg=f"{variable}, step {step}")


def test_small_gradients_as_float16(traces: list[Trace]) -> None:
    # A part of the gradients gives this part of the updates: the factors of PowerSGD do not shrink squared.
    for small, whole in zip(updates(traces[0]["chain_of_small"]), updates(traces[0]["chain"])):
        np.testing.assert_allclose(small[0] * 1e4, whole[0], atol=0.1)


def test_a_block_that_is_not_full_has_the_size_of_its_numbers(traces: list[Trace]) -> None:
    # 984 numbers for the blocks of 1024 of two or three ranks: with zeros among them the sizes would be smaller.
    first = np.abs(updates(traces[0]["sign_default"])[1][0])
    assert first.max() > 0.5


def test_less_than_all_is_sent(traces: list[Trace]) -> None:
    for name in WITH_FEEDBACK:
        rests = [np.array(trace[name][-1]["rests"]["kernel"]) for trace in traces]
        assert all(np.abs(rest).max() > 0.1 for rest in rests), name
        assert not np.array_equal(rests[0], rests[1]), name


def test_each_rank_sends_a_tenth(traces: list[Trace]) -> None:
    kept = [np.array(trace["top_k"][0]["rests"]["kernel"]) for trace in traces]
    assert all((rest == 0).sum() == 96 for rest in kept)
    first = updates(traces[0]["top_k"])[0]
    assert 96 <= (first[0] != 0).sum() <= 96 * len(traces)
    np.testing.assert_allclose(first[1], exact(0, len(traces))[1], atol=1e-5)  # Small ones are sent as they are.


def test_the_first_steps_are_exact(traces: list[Trace]) -> None:
    for name, steps in (("sign", 2), ("power_sgd_later", 3)):
        for step in range(steps + 1):
            found, expected = updates(traces[0][name])[step][0], exact(step, len(traces))[0]
            assert (np.abs(found - expected).max() < 1e-5) == (step < steps), (name, step)


def test_matrices_have_the_rank_that_was_asked_for(traces: list[Trace]) -> None:
    for name, rank in (("power_sgd", 2), ("where", 3)):
        for step, update in enumerate(updates(traces[0][name])):
            values = np.linalg.svd(update[0], compute_uv=False)
            assert values[rank] < 1e-4 and (values[rank - 1] > 0.1 or step == BROKEN), (name, step)


def test_the_ratio_of_a_warm_up_falls_by_quarters(traces: list[Trace]) -> None:
    sent = [(np.array(traces[0]["dgc"][step]["rests"]["kernel"]) == 0).sum() for step in range(STEPS)]
    # 960 numbers: a quarter of them, a sixteenth, then 2 %. The step that is skipped does not count.
    assert sent == [240, 240, 60, 60, 19, 19, 19, 19]


def dense(step: int, rank: int) -> list[np.ndarray]:
    """The gradients of a rank."""
    kernel, bias, rows = drawing["gradients"](step, rank)
    table: np.ndarray = np.zeros(SHAPES["table"], "float32")
    table[[4, 1]] = rows
    return [kernel, bias, table]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", range(3), ids=list(SHAPES))
def test_momentum_that_is_not_sent_is_kept(traces: list[Trace], name: str, place: int) -> None:
    ranks, variable = len(traces), list(SHAPES)[place]
    taken = updates(traces[0][name])
    momentum, variance, before, kept_before = (np.zeros(SHAPES[variable]) for _ in range(4))
    for number, step in enumerate((step for step in range(STEPS) if step != BROKEN), start=1):
        parts = [dense(step, rank)[place] for rank in range(ranks)]
        moved = taken[step][place] * (1 - 0.9**number) / RATE  # In learning rates.
        kept = sum(np.array(trace[name][step]["rests"][variable]) for trace in traces)
        if number <= FREEZE:
            # Of the table too: ranks that look up the same rows are one lookup.
            momentum, variance = 0.9 * momentum + 0.1 * sum(parts), 0.999 * variance + 0.001 * sum(parts) ** 2
            unit = (np.sqrt(variance) + 1e-7) / np.sqrt(1 - 0.999**number)
            np.testing.assert_allclose(moved, momentum / unit, atol=2e-4)
            assert not kept.any()
        else:
            limit = 0.1 / 0.001**0.5
            wanted = sum(
                np.clip(0.9 * before / ranks + 0.1 * part / unit, -limit / ranks**0.5, limit / ranks**0.5)
                for part in parts
            )
            is_sent = np.abs(moved) < 0.99 * limit
            assert is_sent.mean() > 0.9 and np.abs(moved).max() < 1.01 * limit
            np.testing.assert_allclose((moved + kept)[is_sent], (wanted + kept_before)[is_sent], atol=1e-3)
            assert np.abs(kept).max() > 1e-3
        before, kept_before = moved, kept


@pytest.mark.parametrize("name", ["none", *WITHOUT_STATE, *WITH_FEEDBACK, "dgc", *OPTIMIZERS])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(traces: list[Trace], name: str) -> None:
    for trace in traces:
        assert trace[name][BROKEN] == trace[name][BROKEN - 1]
        assert trace[name][BROKEN + 1]["weights"] != trace[name][BROKEN]["weights"]
        assert np.isfinite(np.array(trace[name][-1]["weights"][0])).all()
