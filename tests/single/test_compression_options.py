"""Compressions: wrong options and optimizers are refused before the first step, and what a single worker does."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import tfdistkit
from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    (
        ("ByteGrad", {"block": 0}, "`block` must be"),
        ("Int8", {"stochastic": "yes"}, "`stochastic` must be"),
        ("Sign", {"warmup_steps": 0}, "`warmup_steps` must be"),
        ("Sign", {"warmup_steps": 1, "block": 12}, "a multiple of 8"),
        ("TopK", {"ratio": 0}, "`ratio` must be"),
        ("TopK", {"ratio": 1.0}, "`ratio` must be between 0 and 1"),
        ("TopK", {"momentum": 1.0}, "at least 0 and below 1"),
        ("TopK", {"clip_norm": -1}, "`clip_norm` must be"),
        ("TopK", {"min_size": 0.5}, "`min_size` must be"),
        ("PowerSGD", {"rank": 0}, "`rank` must be"),
        ("PowerSGD", {"min_compression_rate": 0.5}, "must be at least 1"),
        ("PowerSGD", {"start_after": -1}, "`start_after` must be"),
        ("TopK", {"momentum": "a"}, "`momentum` at least 0 and below 1"),
        ("Where", {"predicate": "kernel", "then": None}, "must be a function of a variable"),
        ("Where", {"predicate": bool, "then": "fp16"}, "must be a tfdistkit.communication.Reducer"),
        ("Chain", {"first": None, "then": None}, "A compression is missing"),
        ("OneBitAdam", {"freeze_after": 0}, "`freeze_after` must be"),
        ("OneBitAdam", {"freeze_after": 5, "beta_1": 1.0}, "`beta_1` and `beta_2` must be"),
        ("OneBitAdam", {"freeze_after": 5, "global_clipnorm": 1.0}, "cannot clip gradients"),
        ("QAdam", {"warmup_steps": 2.5}, "`warmup_steps` must be"),
        ("QAdam", {"warmup_steps": 5, "clipvalue": 0.5}, "cannot clip gradients"),
        ("Where", {"predicate": bool, "then": tfdistkit.algorithms.LocalSGD()}, "cannot be a part of a compression"),
    ),
)
def test_wrong_options(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        getattr(tfdistkit.compression, name)(**arguments)


@pytest.mark.parametrize("every", (0, -1, 10**30, 2.5, "often", "0 seconds", "5 steps"))
def test_wrong_periods(every: Any) -> None:
    for algorithm in (tfdistkit.algorithms.LocalSGD, tfdistkit.algorithms.DiLoCo):
        with pytest.raises(OptionError, match="`every` must be"):
            algorithm(every)


def test_numbers_of_the_outer_optimizer() -> None:
    import keras

    given = tfdistkit.algorithms.DiLoCo(5, {"learning_rate": 0.5, "nesterov": False})
    assert given.describe() == tfdistkit.algorithms.DiLoCo(5, keras.optimizers.SGD(0.5, momentum=0.9)).describe()


def test_algorithms_are_made_before_tensorflow_starts() -> None:
    code = """
        from tensorflow.python.eager import context
        from tfdistkit import algorithms as a
        made = [a.DiLoCo(5), a.DiLoCo(5, {"momentum": 0.5}, compression="fp16"), a.Hierarchical(across=a.DiLoCo(5))]
        assert not context.context()._initialized
    """
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=variables, check=True, timeout=120)


def test_wrong_outer_optimizers() -> None:
    import keras

    for outer in ("sgd", keras.optimizers.Adam(), {"rate": 0.5}, {"learning_rate": "high"}, {"momentum": -1.0}):
        with pytest.raises(OptionError, match="`outer` must be a keras.optimizers.SGD"):
            tfdistkit.algorithms.DiLoCo(10, outer)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    (
        ("Decentralized", {"peers": "some"}, "`peers` must be one of"),
        ("Decentralized", {"every": 0}, "`every` must be"),
        ("Decentralized", {"every": "30 seconds"}, "`every` must be"),
        ("Decentralized", {"compression": 8}, "`compression` must be a name"),
        ("Decentralized", {"compression": tfdistkit.algorithms.LocalSGD()}, "must not be an algorithm itself"),
        ("Decentralized", {"peers": "shift_one", "compression": tfdistkit.compression.TopK()}, "two workers can use"),
        ("Decentralized", {"peers": "shift_one", "compression": tfdistkit.compression.Sign(1)}, "two workers can use"),
        ("AsyncModelAverage", {"every_ms": 0}, "`every_ms` must be"),
        ("AsyncModelAverage", {"warmup_steps": -1}, "`warmup_steps` must be"),
        ("DiLoCo", {"fragments": 0}, "`fragments` must be"),
        ("DiLoCo", {"every": 2, "fragments": 3}, "`fragments` must be at most `every`"),
        ("DiLoCo", {"every": 4, "delay": 4}, "`delay` below `every`"),
        ("DiLoCo", {"delay": -1}, "`delay` must be"),
        ("DiLoCo", {"mix": 1.0}, "`mix` must be at least 0 and below 1"),
        ("DiLoCo", {"every": "30 seconds", "delay": 1}, "`every` must be an integer"),
        ("DiLoCo", {"compression": "zip"}, "`compression` must be"),
        ("Hierarchical", {"inside": "zip"}, "`inside` must be one of"),
        ("Hierarchical", {"inside": 16}, "`inside` must be one of"),
        ("Hierarchical", {"inside": tfdistkit.algorithms.LocalSGD()}, "`inside` of Hierarchical must not be"),
        ("Hierarchical", {"across": tfdistkit.compression.FP16()}, "`across` must be a `LocalSGD` or a `DiLoCo`"),
        ("Hierarchical", {"across": 50}, "`across` must be a `LocalSGD` or a `DiLoCo`"),
        ("Hierarchical", {"across": tfdistkit.algorithms.Decentralized()}, "`across` must be a `LocalSGD`"),
        ("Hierarchical", {"across": tfdistkit.algorithms.AsyncModelAverage()}, "`across` must be a `LocalSGD`"),
        ("Hierarchical", {"across": tfdistkit.algorithms.Hierarchical()}, "`across` must be a `LocalSGD`"),
        (
            "Hierarchical",
            {"across": tfdistkit.algorithms.DiLoCo(compression=tfdistkit.compression.ByteGrad())},
            "`across` must send sums",
        ),
    ),
)
def test_wrong_options_of_algorithms(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        getattr(tfdistkit.algorithms, name)(**arguments)


def test_a_momentum_of_a_compression_beside_that_of_an_algorithm() -> None:
    momentum = tfdistkit.compression.TopK(momentum=0.9)
    with pytest.raises(UnsupportedError, match="`inside` must have no momentum"):
        tfdistkit.algorithms.Hierarchical(momentum)
    with pytest.raises(UnsupportedError, match="the optimizer's momentum already"):
        tfdistkit.algorithms.Decentralized(compression=momentum)
    with pytest.raises(UnsupportedError, match="would count twice"):
        tfdistkit.algorithms.DiLoCo(compression=momentum)


def test_more_fragments_than_variables() -> None:
    from tfdistkit.communication.algorithms.diloco import divided

    class Variable:
        def __init__(self, *shape: int):
            self.shape = shape

    variables = [Variable(8), Variable(6, 2), Variable(3), Variable(0)]
    assert divided(variables, 2) == [[1], [0, 2, 3]]
    assert divided(variables, 4) == [[1], [0], [2], [3]]
    with pytest.raises(OptionError, match="at most the number of variables"):
        divided(variables, 5)


def test_the_second_of_a_chain_keeps_nothing() -> None:
    with pytest.raises(OptionError, match="must keep no state"):
        tfdistkit.compression.Chain(tfdistkit.compression.FP16(), tfdistkit.compression.TopK())


@pytest.mark.parametrize(
    ("given", "words"),
    (
        ({"compression": "fp61"}, "`compression` must be"),
        ({"compression": 16}, "a name, or an object of `tfdistkit.compression`"),
        ({"compression": tfdistkit.compression.FP16}, "a name, or an object"),
        ({"compression": "fp16", "reducer": tfdistkit.communication.Sum()}, "must not be given together"),
        ({"compression": tfdistkit.algorithms.LocalSGD()}, "must be given as `algorithm`, not as `compression`"),
        ({"reducer": tfdistkit.algorithms.LocalSGD()}, "must be given as `algorithm`, not as `reducer`"),
        ({"algorithm": "local"}, "an object of `tfdistkit.algorithms`"),
        ({"algorithm": tfdistkit.compression.FP16()}, "an object of `tfdistkit.algorithms`"),
        ({"algorithm": tfdistkit.algorithms.LocalSGD(), "compression": "bf16"}, "without `compression` and `reducer`"),
    ),
)
def test_wrong_options_of_the_strategy(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        tfdistkit.strategy("multiworker", **given)


@pytest.mark.parametrize("strategy", ("mirrored", "central_storage", "parameter_server", "one_device"))
def test_strategies_whose_replicas_send_nothing(strategy: Any) -> None:
    if strategy == "mirrored":
        with pytest.raises(UnsupportedError, match="replicas in processes of their own"):
            tfdistkit.strategy(strategy, reducer=tfdistkit.algorithms.Decentralized())
    with pytest.raises(OptionError, match='has no option `algorithm`(?s:.*)Use "multiworker" or "horovod"'):
        tfdistkit.strategy(strategy, algorithm=tfdistkit.algorithms.AsyncModelAverage())


def test_several_gpus_in_a_process() -> None:
    """`fp16` needs nothing of the kind; others send what replicas of a process cannot (`Wire.gather`)."""
    from types import SimpleNamespace

    from tfdistkit.strategies.contract import KerasStrategyMixin

    c, two = tfdistkit.compression, SimpleNamespace(extended=SimpleNamespace(worker_devices=("GPU:0", "GPU:1")))
    for reducer in (c.ByteGrad(), c.PowerSGD(1), tfdistkit.algorithms.LocalSGD(), c.Chain(c.TopK(), c.FP16())):
        with pytest.raises(UnsupportedError, match="2 replicas that share a process"):
            KerasStrategyMixin.require_own_processes(two, reducer)  # type: ignore[arg-type]
    KerasStrategyMixin.require_own_processes(two, c.FP16())  # type: ignore[arg-type]


@pytest.mark.parametrize("communication", ("ring", "shm"))
def test_an_algorithm_for_hosts_where_ranks_share_no_memory(communication: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"of several Linux hosts(?s:.*)communication='{communication}'"):
        tfdistkit.strategy("multiworker", algorithm=tfdistkit.algorithms.Hierarchical(), communication=communication)


def test_momentum_that_would_count_twice() -> None:
    import keras

    momentum = tfdistkit.compression.TopK(0.1, momentum=0.9)
    for optimizer in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam()):
        with pytest.raises(UnsupportedError, match="would count twice"):
            momentum.check_optimizer(optimizer)
    momentum.check_optimizer(keras.optimizers.SGD(0.1))
    tfdistkit.compression.TopK(0.1).check_optimizer(keras.optimizers.Adam())
    both = tfdistkit.compression.Where(lambda variable: True, momentum)
    with pytest.raises(UnsupportedError, match="would count twice"):
        tfdistkit.compression.Chain(both, tfdistkit.compression.FP16()).check_optimizer(keras.optimizers.Adam())


def test_signs_with_a_momentum() -> None:
    import keras

    sign = tfdistkit.compression.Sign(10)
    with pytest.raises(UnsupportedError, match="without `momentum`"):
        sign.check_optimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    sign.check_optimizer(keras.optimizers.Adam())


def test_one_worker_compresses_nothing() -> None:
    import keras
    import numpy as np

    def trained(**options: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        strategy = tfdistkit.strategy("multiworker", **options)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(np.ones((6, 8)), np.ones((6, 8)), batch_size=4, verbose=0)
        return list(model.get_weights())

    for found, expected in zip(trained(compression=tfdistkit.compression.PowerSGD(1)), trained(), strict=True):
        np.testing.assert_array_equal(found, expected)


def trained(optimizer: Any, steps: int = 12, scale: float = 1.0) -> Any:
    """Returns a model of one process; its last input is zero in the first 6 steps."""
    import keras
    import numpy as np

    random = np.random.default_rng(2)
    x, y = random.normal(size=(12, 5, 4)).astype("float32"), random.normal(size=(12, 5, 3)).astype("float32")
    x[:6, :, -1] = 0.0
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh", use_bias=False), keras.layers.Dense(3)])
    model.compile(optimizer, "mse")
    for step in range(steps):
        model.train_on_batch(x[step] * scale, y[step] * scale)
    return model


OPTIONS: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}, {"use_ema": True}, {"gradient_accumulation_steps": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_adam_before_the_variance_is_frozen(options: dict[str, Any]) -> None:
    import keras
    import numpy as np

    c = tfdistkit.compression
    expected = trained(keras.optimizers.Adam(0.02, **options))
    for optimizer in (c.OneBitAdam(0.02, freeze_after=12, **options), c.QAdam(0.02, warmup_steps=12, **options)):
        found = trained(optimizer)
        for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        for one, other in zip(found.optimizer.variables, expected.optimizer.variables, strict=True):
            assert one.path.split("/", 1)[1].split("_")[-1] == other.path.split("/", 1)[1].split("_")[-1]


def test_a_variance_that_is_frozen(tmp_path: Any) -> None:
    import keras
    import numpy as np

    model = trained(tfdistkit.compression.OneBitAdam(0.02, freeze_after=6))
    frozen = trained(tfdistkit.compression.OneBitAdam(0.02, freeze_after=6), steps=6)
    for one, other in zip(model.optimizer.velocities, frozen.optimizer.velocities, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    # What no gradient was seen of in the first steps moves as far as Adam would move it, not by a million times more.
    moved = np.abs(model.get_weights()[0] - frozen.get_weights()[0])[-1]
    assert frozen.optimizer.velocities[0].numpy()[-1].max() == 0 and 0.01 < moved.max() < 6 * 0.02 * 3.2 / 0.47
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is tfdistkit.compression.OneBitAdam
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_gradients_that_are_reduced_in_two_ways() -> None:
    import keras

    for options in ({"compression": "fp16"}, {"algorithm": tfdistkit.algorithms.LocalSGD()}):
        with tfdistkit.strategy("multiworker", **options).scope():
            optimizer = tfdistkit.compression.OneBitAdam(freeze_after=5)
            with pytest.raises(UnsupportedError, match="can be reduced in one way"):
                optimizer.build([keras.Variable([1.0])])


def test_momentum_and_clipping_that_one_worker_would_miss() -> None:
    c = tfdistkit.compression
    for compression in (c.TopK(momentum=0.9), c.Chain(c.TopK(clip_norm=1.0), c.FP16())):
        with pytest.raises(UnsupportedError, match="need several workers"):
            tfdistkit.strategy("multiworker", compression=compression)


@pytest.mark.parametrize("name", ("algorithms", "compression"))
def test_names_are_imported_as_the_documentation_shows(name: str) -> None:
    module = importlib.import_module(f"tfdistkit.{name}")  # from tfdistkit.compression import FP16
    assert module is getattr(tfdistkit, name) and dir(module) == sorted(module.__all__)
    original = importlib.import_module(f"tfdistkit.communication.{name}")
    assert all(getattr(module, one) is getattr(original, one) for one in original.__all__)


def test_texts_that_ranks_compare() -> None:
    c = tfdistkit.compression
    assert c.PowerSGD(2).describe() == (
        "PowerSGD(min_compression_rate=2.0, min_size=0, rank=2, start_after=0, warm_start=True)"
    )
    assert tfdistkit.algorithms.Hierarchical("fp16").describe() == (
        "Hierarchical(inside=FP16, across=LocalSGD(every=50, warmup_steps=0, slots='average'))"
    )
    assert c.Chain(c.Where(bool, c.TopK(0.5)), c.FP16()).describe() == (
        "Chain(Where(TopK(clip_norm=None, min_size=0, momentum=0.0, ratio=0.5, warmup_steps=0), Average), FP16)"
    )


def test_what_a_predicate_chose_is_told_for_each_variable_and_stays() -> None:
    import keras
    import numpy as np

    c, answers = tfdistkit.compression, iter([True, False, True])
    where = c.Where(lambda variable: next(answers), c.Chain(c.Int8(min_size=5), c.FP16()), c.TopK(0.5))
    variables = [keras.Variable(np.zeros(size, "float32")) for size in ((2, 3), (4,), (1,))]
    int8 = f"{c.Int8(min_size=5).describe()}"
    told = [f"Chain({int8}, FP16)", c.TopK(0.5).describe(), f"Chain({int8} (uncompressed), FP16)"]
    assert where.choices(variables) == told
    assert where.choices(variables[::-1]) == told[::-1]  # The predicate is not asked again: it has no answers left.
    diloco = tfdistkit.algorithms.DiLoCo(3, compression=where)
    assert diloco.choices(variables) == [f"{diloco.describe()} by {one}" for one in told]
    of_sum = tfdistkit.communication.Sum(c.FP16())
    assert of_sum.choices(variables[:1]) == ["Sum(FP16)"]


def test_variables_whose_gradients_travel_otherwise_are_named() -> None:
    from tfdistkit.strategies.consistency import choice_comparison

    kernel, bias = choice_comparison.Choice([2, 3], "float32", "FP16"), choice_comparison.Choice([3], "float32", "Sign")
    paths = [["dense/kernel", "dense/bias"]] * 3
    choice_comparison.require_same([[kernel, bias]] * 3, paths)
    for change, words in (
        ({"reducer": "Average"}, "variable 1: `dense/bias` of shape (3,) and float32, by Sign on rank 0; "
         "`dense/bias` of shape (3,) and float32, by Average on rank 2"),
        ({"shape": [4]}, "of shape (4,) and float32 on rank 2"),
        ({"dtype": "float16", "reducer": "FP16"}, "of shape (3,) and float16 on rank 2"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=re.escape(words)):
            choice_comparison.require_same([[kernel, bias], [kernel, bias], [kernel, bias._replace(**change)]], paths)
    with pytest.raises(OptionError, match="2 variables on rank 0; 1 variables on rank 1"):
        choice_comparison.require_same([[kernel, bias], [kernel]], paths)
