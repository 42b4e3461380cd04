"""Draws programs with hypothesis. What is drawn is what users may write, whether a strategy of ours handles it or not.

Left out is what cannot equal one process by definition (docs/exactness.md): Dropout and other random layers, local
BatchNormalization, and losses that are no means in eager steps.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz import (
    callback_list,
    feeding,
    loops,
    networks,
    number_losses,
    objectives,
    stateful_steps,
    training_steps,
    whole_models,
)
from fuzz.programs import Program

# Keras reads these from generators and PyDatasets as objects, on which it cannot train.
_IN_DATASETS_ONLY = ("ragged", "words")
# Sums over rows are in kept cases: another layer here would draw other programs for every number.
_BODY = tuple(name for name in networks.BODY if name != "row_sums")
# Keras without a strategy traces their functions while it builds a model, and uses what it traced in the training,
# where they then write nothing and have no gradients. Models that are built before are right.
_WITH_FUNCTIONS = ("own_function", "function_with_state")
_LAYERS_BY_WEIGHT = ("dense", *_BODY)


def _one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def _rarely(*values: Any, usual: Any, of: int = 4) -> st.SearchStrategy[Any]:
    """One of `values` in about one case of `of`."""
    return st.integers(0, of - 1).flatmap(lambda n: st.sampled_from(values) if n == of - 1 else st.just(usual))


@st.composite
def _data(draw: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    inputs = draw(_one_of(*kinds))
    batch = draw(st.integers(1, 7))
    feeds = [f for f in feeding.FEEDS if inputs not in _IN_DATASETS_ONLY or ("dataset" in f and "py" not in f)]
    feed = draw(_one_of(*feeds))
    rows = draw(st.integers(batch if feed == "dropped_dataset" else 1, 14))
    repeats = feed in ("repeated_dataset", "rows_repeated", "generator") or feed in feeding.ARRAYS
    steps = draw(_rarely(2, 3, usual=0)) if repeats else 0
    validation = draw(_rarely("arrays", "dataset", "split", usual="", of=2))
    if validation == "split" and (feed not in feeding.ARRAYS or rows < 4):
        validation = "dataset"
    if validation == "arrays" and inputs in _IN_DATASETS_ONLY:
        validation = "dataset"
    return {
        "inputs": inputs,
        "batch": batch,
        "rows": rows,
        "feed": feed,
        "steps_per_epoch": steps,
        "validation": validation,
        "epochs": draw(st.integers(1, 3)),
        "seed": draw(st.integers(1, 99)),
    }


@st.composite
def _model(draw: Any, inputs: str, own_loss: bool) -> dict[str, Any]:
    kinds = ["number", "flat", "yes_no"]
    if not own_loss:
        kinds += ["class", "two", "none"]
    if inputs in ("tokens", "ragged"):
        kinds += ["tokens", "tokens"]
    targets = draw(_one_of(*kinds))
    styles = ["functional", "subclassed"]
    if targets != "two" and inputs not in ("named", "nested", "ragged"):
        styles.append("sequential")
    encoders = networks.SEQUENCES if targets == "tokens" else networks.ENCODERS[inputs]
    if targets == "tokens" and inputs == "ragged":
        inputs = "tokens"
    style = "subclassed" if inputs == "ragged" else draw(_one_of(*styles))
    layers = draw(st.lists(_one_of(*_LAYERS_BY_WEIGHT), max_size=3))
    if inputs == "ragged":
        layers = [name for name in layers if name not in _WITH_FUNCTIONS]
    elif style == "subclassed" and set(layers) & set(_WITH_FUNCTIONS):
        style = "functional"
    return {
        "inputs": inputs,
        "targets": targets,
        "style": style,
        "encoder": draw(_one_of(*encoders)),
        "body": tuple(layers),
    }


@st.composite
def _objective(draw: Any, targets: str, feed: str) -> dict[str, Any]:
    loss = draw(_one_of(*objectives.LOSSES_OF_TARGETS[targets]))
    reductions: Any = _rarely("sum", "mean_with_sample_weight", "none", usual="", of=3)
    weights = ["rows", "zeros"]
    if targets in ("yes_no", "class") and feed != "generator":
        weights.append("classes")
    weights += {"tokens": ["tokens"], "two": ["outputs"]}.get(targets, [])
    names = objectives.METRICS_OF_TARGETS[targets]
    metrics = draw(st.lists(_one_of(*names), min_size=1, max_size=3, unique=True)) if names else []
    return {
        "loss": loss,
        "reduction": draw(reductions) if loss not in ("", *objectives.FUNCTIONS) else "",
        "weights": "" if targets == "none" else draw(_rarely(*weights, usual="", of=3)),
        "loss_weights": targets == "two" and draw(st.booleans()),
        "metrics": tuple(metrics),
        "weighted_metrics": draw(_rarely(True, usual=False)) and "own_scalar" not in metrics,
    }


@st.composite
def _optimizer(draw: Any, plain: bool) -> dict[str, Any]:
    found = {
        "optimizer": draw(_one_of("sgd", *objectives.OPTIMIZERS)),
        "clip": draw(_rarely("clipnorm", "global_clipnorm", "clipvalue", usual="")),
        "accumulation": draw(_rarely(2, 3, usual=0, of=6)),
        "ema": draw(_rarely("ema", "overwrite", usual="", of=6)),
        "schedule": draw(_rarely(True, usual=False, of=5)),
    }
    return {**found, "loss_scale": plain and draw(_rarely(True, usual=False, of=10))}


@st.composite
def _acts(draw: Any, has_schedule: bool) -> dict[str, Any]:
    acts = draw(st.lists(_one_of("evaluate", "predict", "fit", *_ACTS), max_size=2))
    first = draw(_rarely("train_on_batch", usual="fit", of=6))
    callbacks = tuple(draw(_rarely(*callback_list.CALLBACKS, usual=None, of=3)) for _ in range(2))
    possible = [c for c in callbacks if c and not (has_schedule and c in _SET_RATES)]
    found = {"acts": (first, *acts), "callbacks": tuple(dict.fromkeys(possible))}
    if first == "fit" and draw(_rarely(True, usual=False, of=6)):
        found["interrupt"] = draw(st.integers(1, 6))
        found["save_every"] = draw(st.integers(1, 3))
    return found


_ACTS = ("fit_again", "test_on_batch", "predict_on_batch", "train_on_batch", "save_and_load")
# A rate from a schedule cannot be set.
_SET_RATES = ("rate", "plateau", "rate_by_batch")


@st.composite
def _keras_programs(draw: Any) -> Program:
    """Stacks of layers, compiled; some with a step of their own."""
    step = draw(_rarely(*training_steps.OWN_LOSS, *training_steps.COMPILED, usual="keras", of=3))
    own_loss = step in training_steps.OWN_LOSS
    gathers = step == "accumulating"  # In one variable for each of the model's, so the model must be built.
    kinds = [kind for kind in networks.ENCODERS if not (gathers and kind == "ragged")]
    data = draw(_data(kinds=("numbers", "tokens", "tokens", *kinds)))
    model = draw(_model(data["inputs"], own_loss or step in ("more_compute_loss", "guide")))
    if gathers and model["style"] == "subclassed":
        model["style"] = "functional"
    objective = draw(_objective(model["targets"], data["feed"]))
    if own_loss and step != "own_test_step":
        objective = {}
    optimizer = draw(_optimizer(plain=step in ("keras", "scaled", "own_compute_loss", "more_compute_loss")))
    running = {"execution": draw(_rarely(2, 3, usual=1, of=5)), "eager": draw(_rarely(True, usual=False, of=10))}
    if running["eager"]:
        running["execution"] = 1
    if data["feed"] in ("generator", "repeated_dataset", "rows_repeated") or data["steps_per_epoch"]:
        running["execution"] = 1  # With `steps_per_epoch`, Keras needs a multiple.
    acts = draw(_acts(optimizer["schedule"]))
    return Program(step=step, **{**data, **model, **objective, **optimizer, **running, **acts})


@st.composite
def _whole_models(draw: Any) -> Program:
    """Keras's examples with a `train_step`."""
    step = draw(_one_of(*whole_models.MODELS))
    data = draw(_data(kinds=("numbers",)))
    optimizer = {**draw(_optimizer(plain=False))}
    if step == "wgan":
        data["validation"] = ""
    if step == "distiller" and data["validation"]:
        data["validation"] = ""
    acts = tuple(draw(st.lists(_one_of(*whole_models.ACTS[step]), max_size=2)))
    return Program(step=step, **data, **optimizer, targets="none", loss="", acts=("fit", *acts))


@st.composite
def _loops(draw: Any) -> Program:
    """Custom loops with `strategy.run`."""
    step = draw(_one_of(*loops.LOOPS))
    data = draw(_data(kinds=("numbers", "images", "tokens")))
    data.update(feed="dataset", validation="", steps_per_epoch=0)
    targets = draw(_one_of("number", "flat"))
    if step == "loop_average" or step == "loop_keras":
        targets = "number"
    layers = [name for name in _BODY if name not in ("activity_loss", "rows_loss", "l2", "activity")]
    body = tuple(draw(st.lists(_one_of(*layers), max_size=2)))
    encoder = draw(_one_of(*networks.ENCODERS[data["inputs"]]))
    style = draw(_one_of("sequential", "functional", "subclassed"))
    if style == "subclassed" and set(body) & set(_WITH_FUNCTIONS):
        style = "functional"
    eager = draw(_rarely(True, usual=False, of=6))
    optimizer = draw(_optimizer(plain=False))
    model = {"targets": targets, "encoder": encoder, "body": body, "style": style}
    return Program(step=step, **data, **model, eager=eager, **optimizer)


@st.composite
def _number_losses(draw: Any) -> Program:
    """Losses that are no means over rows, and changed gradients."""
    data = draw(_data(kinds=("numbers", "numbers", "tokens", "images")))
    targets = draw(_one_of("number", "flat"))
    layers = [name for name in _BODY if name not in _WITH_FUNCTIONS]
    body = tuple(draw(st.lists(_one_of("dense", *layers), max_size=1)))
    encoder = draw(_one_of(*networks.ENCODERS[data["inputs"]]))
    model = {"targets": targets, "encoder": encoder, "body": body, "style": draw(_one_of("functional", "subclassed"))}
    step = draw(_one_of("numbers", "numbers", "numbers_compute_loss", "keras"))
    names = draw(st.lists(_one_of(*number_losses.PARTS), min_size=1, max_size=2, unique=True))
    change = draw(_rarely(*number_losses.CHANGES, usual="", of=3)) if step == "numbers" else ""
    loss = {"loss": draw(_one_of("numbers", "numbers_class"))} if step == "keras" else {}
    metrics = tuple(draw(st.lists(_one_of("mae", "own_max"), max_size=1))) if step != "numbers" else ()
    acts = draw(st.lists(_one_of(*_ACTS, "evaluate", "fit"), max_size=2))
    first = draw(_rarely("train_on_batch", usual="fit", of=3))
    running = {"execution": draw(_rarely(2, usual=1)) if data["feed"] in feeding.ARRAYS else 1}
    if data["steps_per_epoch"]:
        running["execution"] = 1
    if data["feed"] in ("dataset", "dropped_dataset"):
        running["distributed"] = draw(st.booleans())
    found = {**data, **model, **loss, **running, "metrics": metrics, "acts": (first, *acts)}
    return Program(step=step, numbers=tuple(names), change=change, optimizer=draw(_one_of("sgd", "adam")), **found)


@st.composite
def _stateful_steps(draw: Any) -> Program:
    """Steps with state of their own, side effects, and gradients that branches change."""
    data = draw(_data(kinds=("numbers", "numbers", "tokens")))
    encoder = draw(_one_of(*networks.ENCODERS[data["inputs"]]))
    body = tuple(draw(st.lists(_one_of("dense", "l2", "layer_norm", "running_mean"), max_size=1)))
    model = {"targets": "number", "encoder": encoder, "body": body, "style": draw(_one_of("functional", "subclassed"))}
    state = draw(_one_of(*stateful_steps.STATES))
    updates = stateful_steps.UPDATES_OF_INTEGERS if "int" in state else [u for u in stateful_steps.UPDATES if u]
    names = draw(_rarely(*number_losses.PARTS, usual="mean", of=3))
    step = {
        "state": state,
        "update": draw(_one_of(*updates)),
        "use": draw(_one_of(*stateful_steps.USES)),
        "effect": draw(_rarely(*stateful_steps.EFFECTS, usual="", of=3)),
        "way": draw(_one_of(*stateful_steps.WAYS)),
        "change": draw(_rarely(*number_losses.CHANGES, usual="", of=2)),
    }
    acts = draw(st.lists(_one_of("evaluate", "fit", "fit_again", "train_on_batch"), max_size=1))
    running = {"execution": draw(_rarely(2, usual=1)) if data["feed"] in feeding.ARRAYS else 1}
    if data["steps_per_epoch"]:
        running["execution"] = 1
    found = {**data, **model, **step, **running, "acts": ("fit", *acts), "optimizer": draw(_one_of("sgd", "adam"))}
    return Program(step="stateful", numbers=(names,), **found)


# Programs from these numbers on have losses that are no means, and steps with state of their own.
NUMBER_LOSSES, STATEFUL_STEPS = 10_000, 20_000


def programs(number: int = 0) -> st.SearchStrategy[Program]:
    """A strategy for the program of a number."""
    if number >= STATEFUL_STEPS:
        return _stateful_steps()
    if number >= NUMBER_LOSSES:
        return _number_losses()
    kinds = [_keras_programs] * 10 + [_whole_models, _loops]
    return st.sampled_from(kinds).flatmap(lambda kind: kind())


def draw_program(number: int) -> Program:
    """Returns the program of a number, the same in every run.

    Each number is a run of hypothesis of its own: within one, examples are variations of those before, which is
    good for finding the simplest failure, and covers little where one example costs a second.
    """
    found: list[Program] = []

    @seed(number)
    @settings(
        max_examples=2, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(programs(number))
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    return found[-1]  # The first one is the simplest program.


def draw_programs(number: int, first: int = 0) -> list[Program]:
    """Returns the programs of the numbers from `first` on, without duplicates."""
    found: dict[str, Program] = {}
    while len(found) < number:
        program = draw_program(first)
        found.setdefault(program.key(), program)
        first += 1
    return list(found.values())


def simpler(program: Program) -> list[Program]:
    """Returns programs that are one change simpler, those with the largest change first."""
    simplest, found = Program(), []
    for name in program.to_json():
        found.append(program.changed(**{name: getattr(simplest, name)}))
        current = getattr(program, name)
        if isinstance(current, tuple) and len(current) > 1:
            found += [program.changed(**{name: current[:i] + current[i + 1 :]}) for i in range(len(current))]
        if isinstance(current, int) and not isinstance(current, bool) and current > 2 and name != "seed":
            found += [program.changed(**{name: smaller}) for smaller in dict.fromkeys((2, current // 2, current - 1))]
    if program.inputs != "numbers" and program.step not in whole_models.MODELS:
        plain = {"inputs": "numbers", "encoder": "none", "targets": program.targets.replace("tokens", "number")}
        found.insert(0, program.changed(**plain))
    return [p for p in found if p != program and _is_possible(p)]


def _is_possible(program: Program) -> bool:
    encoders = networks.SEQUENCES if program.targets == "tokens" else networks.ENCODERS[program.inputs]
    losses = (
        *objectives.LOSSES_OF_TARGETS[program.targets],
        *(("numbers", "numbers_class") if program.numbers else ()),
    )
    plain = program.step in ("keras", *training_steps.COMPILED)
    return (
        program.encoder in encoders
        and bool(program.numbers)
        == (program.step in (*number_losses.STEPS, "stateful") or program.loss.startswith("numbers"))
        and bool(program.state) == (program.step == "stateful")
        and (not plain or program.loss in losses)
        and not (program.style == "sequential" and (program.targets == "two" or program.inputs in ("named", "nested")))
        and (program.inputs != "ragged" or (program.style == "subclassed" and "dataset" in program.feed))
    )
