"""The table of cases: model, data and training of each. It names no strategy, so every engine runs the same cases.

A model, optimizer, loss or metric is written as `by(name, ...)`: a call to be made later, where Keras is loaded.
"""

from __future__ import annotations

from typing import Any

from parity.case import Call, Case, by


def yes_or_no(name: str, **changes: Any) -> Case:
    """A case of a binary classifier, with accuracy and AUC."""
    metrics = ("accuracy", by("metrics.AUC", name="auc"))
    defaults = dict(model=by("classifier"), data="binary", loss="binary_crossentropy", metrics=metrics)
    return Case(name, **{**defaults, **changes})


def trained(name: str, **options: Any) -> Case:
    """A case that only trains; another case covers `evaluate` and `predict`."""
    return Case(name, run="fit_only", **options)


def sgd(*args: Any, **options: Any) -> Call:
    """Plain gradient descent, which shows a wrong scale of gradients; Adam hides it."""
    return by("optimizers.SGD", *args, **options)


def adam(**options: Any) -> Call:
    """Adam with a large step."""
    return by("optimizers.Adam", 0.01, **options)


CANCELLED = (
    "A bias ends at 0.01 after updates of 0.1 that cancel each other: the updates carry a rounding error of 2e-8 each, "
    "which is larger relative to the bias that remains."
)

_OPTIMIZERS = (
    trained("dense_sgd", optimizer=sgd(0.05, momentum=0.9)),
    Case("dense_adam"),
    trained("dense_adamw", optimizer=by("optimizers.AdamW", 0.01, weight_decay=0.1)),
    Case("loss_scale", optimizer=by("optimizers.LossScaleOptimizer", adam(), dynamic_growth_steps=5)),
    trained("loss_scale_clip", optimizer=by("optimizers.LossScaleOptimizer", sgd(0.5, global_clipnorm=0.1))),
    trained(
        "loss_scale_nan",
        model=by("mlp", by("FaultyGradient")),
        optimizer=by("optimizers.LossScaleOptimizer", sgd(0.01), initial_scale=1024.0, dynamic_growth_steps=3),
    ),
    trained("clipnorm", optimizer=sgd(0.5, clipnorm=0.05)),
    trained("global_clipnorm", optimizer=sgd(0.5, global_clipnorm=0.1)),
    trained("clipvalue", optimizer=sgd(0.5, clipvalue=0.02)),
    Case("ema", optimizer=adam(use_ema=True, ema_momentum=0.9)),
    trained("ema_overwrite", optimizer=adam(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)),
    trained("accumulation", optimizer=adam(gradient_accumulation_steps=2)),
    trained("accumulation_clip", optimizer=sgd(0.5, gradient_accumulation_steps=2, global_clipnorm=0.1)),
    trained(
        "learning_rate_schedule",
        optimizer=by("optimizers.Adam", by("optimizers.schedules.ExponentialDecay", 0.01, 3, 0.5)),
    ),
)

_LAYERS = (
    trained("l2", model=by("mlp", kernel_regularizer="l2"), optimizer=sgd(0.05)),
    Case("conv", model=by("convolution"), data="images", optimizer=sgd(0.05)),
    Case("layer_norm", model=by("mlp", by("layers.LayerNormalization")), optimizer=sgd(0.05)),
    Case("batch_norm", model=by("mlp", by("batch_normalization", momentum=0.9)), optimizer=sgd(0.05), rows=115),
    Case("batch_norm_97", model=by("mlp", by("batch_normalization", momentum=0.9)), optimizer=sgd(0.05), rows=97),
    Case(
        "sync_batch_norm",
        rows=103,
        optimizer=sgd(0.05),
        tolerance=5e-6,
        reason=CANCELLED,
        model=by("mlp", by("layers.BatchNormalization", momentum=0.9, synchronized=True)),
    ),
    trained(
        "sync_batch_norm_97",
        rows=97,
        optimizer=sgd(0.05),
        model=by("mlp", by("layers.BatchNormalization", momentum=0.9, synchronized=True)),
    ),
    yes_or_no("embedding", model=by("embedding"), data="tokens"),
    # Adam squares the rows of a sparse gradient one by one.
    yes_or_no("lookups", model=by("lookups"), data="tokens", optimizer=adam()),
    yes_or_no(
        "embedding_clip", run="fit_only", model=by("embedding"), data="tokens", optimizer=sgd(0.5, global_clipnorm=0.01)
    ),
    yes_or_no("lstm", model=by("lstm"), data="tokens"),
    yes_or_no("lstm_97", model=by("lstm"), data="tokens", rows=97),
    Case("masks", model=by("masked_lstm"), data="padded", optimizer=sgd(0.05)),
    Case("masks_103", model=by("masked_lstm"), data="padded", rows=103, weights="sample"),
    trained(
        "masks_sum",
        model=by("masked_lstm"),
        data="padded",
        optimizer=sgd(0.001),
        loss=by("losses.MeanSquaredError", reduction="sum"),
    ),
    trained("add_loss", model=by("mlp", by("ActivityLoss")), rows=103, optimizer=sgd(0.05)),
    Case("dropout", model=by("mlp", by("layers.Dropout", 0.3)), exact=False),
    yes_or_no("all_layers", model=by("everything"), data="tokens", exact=False),
)

_LOSSES = (
    yes_or_no("accuracy_auc"),
    yes_or_no("sample_weight", weights="sample", rows=103, compile={"weighted_metrics": ["accuracy"]}),
    yes_or_no("class_weight", run="fit_only", weights="class", rows=103),
    yes_or_no(
        "weighted_mean",
        run="fit_only",
        weights="sample",
        rows=103,
        loss=by("losses.BinaryCrossentropy", reduction="mean_with_sample_weight"),
    ),
    Case("sum_reduction", loss=by("losses.MeanSquaredError", reduction="sum"), rows=103, optimizer=sgd(0.001)),
    Case("no_reduction", loss=by("losses.MeanSquaredError", reduction=None), rows=103, optimizer=sgd(0.001)),
    trained("scalar_loss", loss=by("scalar_loss"), rows=103, optimizer=sgd(0.05)),
    trained("boolean_mask_loss", loss=by("masked_loss"), rows=103, optimizer=sgd(0.05)),
    Case(
        "two_outputs",
        model=by("two_outputs"),
        data="named",
        rows=103,
        optimizer=sgd(0.05),
        loss={"one": "mse", "two": "mae"},
        metrics={"one": ["mae"], "two": ["mse"]},
        compile={"loss_weights": {"one": 1.0, "two": 0.3}},
    ),
    Case("nested_inputs", model=by("NestedInputs"), data="nested"),
    Case("strings", model=by("words_and_counts"), data="strings", rows=103),
    Case("sentences", model=by("sentences"), data="sentences"),
    Case(
        "integers",
        model=by("integers"),
        data="classes",
        loss="sparse_categorical_crossentropy",
        metrics=("accuracy",),
        feed="arrays",
    ),
)

_MIXING = (
    yes_or_no("dice", loss=by("losses.Dice"), rows=103, optimizer=sgd(0.5)),
    yes_or_no(
        "tversky_97", run="fit_only", loss=by("losses.Tversky", alpha=0.3, beta=0.7), rows=97, optimizer=sgd(0.5)
    ),
    trained(
        "circle",
        model=by("embedded"),
        data="classes",
        loss=by("losses.Circle", gamma=2.0),
        metrics=None,
        optimizer=sgd(0.05),
        rows=40,
        global_batch=9,
    ),
    yes_or_no("dice_eager", run="fit_only", loss=by("losses.Dice"), rows=97, compile={"run_eagerly": True}),
    yes_or_no("dice_on_batch", run="on_batch", loss=by("mixing", "dice"), rows=65),
    yes_or_no("entropy_and_dice", run="fit_only", loss=by("mixing", "entropy_and_dice"), rows=97, optimizer=sgd(0.5)),
    yes_or_no("losses_in_a_loss", run="fit_only", loss=by("mixing", "objects"), rows=97, optimizer=sgd(0.5)),
    yes_or_no(
        "entropy_and_dice_weighted",
        run="fit_only",
        loss=by("mixing", "entropy_and_dice"),
        rows=103,
        weights="sample",
        optimizer=sgd(0.5),
    ),
    trained("valid_mean", loss=by("mixing", "valid_mean"), rows=97, optimizer=sgd(0.05)),
    trained("valid_mean_execution_3", loss=by("mixing", "valid_mean"), rows=103, compile={"steps_per_execution": 3}),
    trained("pairs", loss=by("mixing", "pairs"), rows=103, optimizer=sgd(0.05)),
    trained("own_sum", loss=by("mixing", "sum"), rows=97, optimizer=sgd(0.05)),
    trained("spread", loss=by("mixing", "spread"), rows=103, optimizer=sgd(0.05)),
    trained("hardest", loss=by("mixing", "hardest"), rows=103, optimizer=sgd(0.05)),
    trained(
        "along_rows",
        loss=by("losses.CosineSimilarity", axis=0),
        metrics=(by("metrics.CosineSimilarity", axis=0),),
        rows=103,
        optimizer=sgd(0.05),
    ),
    trained("valid_mean_own_step", model=by("OwnTrainStep"), loss=by("mixing", "valid_mean"), rows=97, metrics=None),
)

_OWN_METRICS = (
    by("TruePositives"),
    by("Extremes"),
    by("Extremes", "others", "mean"),
    by("MeanOfBatches"),
    by("CenteredError", name="centered"),
    by("RootOfMean", name="root"),
    by("losses.MeanSquaredError"),
    *(by("function", name) for name in ("row_error", "correlation", "mean_error", "of_columns")),
)


def metrics(name: str, **changes: Any) -> Case:
    """A case that compares the logs of every batch and the state of the metrics."""
    defaults = dict(run="fit_batches", metrics=_OWN_METRICS, optimizer=sgd(0.05), rows=70, global_batch=32)
    return Case(name, **{**defaults, **changes})


_METRICS = (
    metrics("own_metrics", weights="sample", compile={"weighted_metrics": [by("TruePositives", "weighted"), "mae"]}),
    metrics("own_metrics_65", rows=65, compile={"steps_per_execution": 3}),
    metrics("own_metrics_eager", rows=37, compile={"run_eagerly": True}),
    metrics(
        "confusion",
        model=by("integers"),
        data="classes",
        loss="sparse_categorical_crossentropy",
        rows=37,
        metrics=("accuracy", by("metrics.MeanIoU", 4, sparse_y_pred=False)),
    ),
    metrics(
        "metrics_of_outputs",
        model=by("two_outputs"),
        data="named",
        loss={"one": "mse", "two": "mae"},
        metrics={"one": [by("TruePositives"), "mae"], "two": [by("TruePositives"), by("function", "correlation")]},
    ),
    metrics("trackers", model=by("Trackers"), metrics=None, compile={"steps_per_execution": 2}),
    metrics("trackers_65_eager", model=by("Trackers"), metrics=None, rows=65, compile={"run_eagerly": True}),
    metrics("own_logs", model=by("OwnLogs"), metrics=None, rows=65),
    metrics("loss_alone", model=by("LossAlone"), metrics=None),
    metrics("own_compute_metrics", model=by("OwnComputeMetrics"), metrics=("mae",)),
)

_BATCHES = (
    yes_or_no("rows_103", rows=103),
    yes_or_no("rows_97", rows=97),
    yes_or_no("rows_7", rows=7),
    trained("rows_103_sgd", rows=103, optimizer=sgd(0.05, momentum=0.9)),
    trained("rows_97_accumulation", rows=97, optimizer=adam(gradient_accumulation_steps=2)),
    Case("conv_1", model=by("convolution"), data="images", optimizer=sgd(0.05), rows=65),
    Case(
        "conv_1_eager",
        model=by("convolution"),
        data="images",
        optimizer=sgd(0.05),
        rows=65,
        run="fit_only",
        compile={"run_eagerly": True},
    ),
    trained(
        "sync_batch_norm_1",
        rows=65,
        optimizer=sgd(0.05),
        model=by("mlp", by("layers.BatchNormalization", momentum=0.9, synchronized=True), use_bias=False),
    ),
    trained(
        "unreduced_loss_1",
        loss=by("losses.MeanSquaredError", reduction="mean_with_sample_weight"),
        rows=65,
        optimizer=sgd(0.05),
    ),
    Case("scalar_loss_1", loss=by("scalar_loss"), rows=65, optimizer=sgd(0.05)),
    yes_or_no("on_batch_1", run="on_batch", rows=65),
    Case("execution_4", compile={"steps_per_execution": 4}, rows=128),
    yes_or_no("execution_3", compile={"steps_per_execution": 3}, rows=103),
    # IndexedSlices, whose numbers of rows differ between the steps of an execution.
    yes_or_no(
        "execution_3_embedding", model=by("embedding"), data="tokens", compile={"steps_per_execution": 3}, rows=103
    ),
    trained(
        "execution_3_accumulation", compile={"steps_per_execution": 3}, optimizer=adam(gradient_accumulation_steps=2)
    ),
    yes_or_no("eager", compile={"run_eagerly": True}, rows=103),
    trained(
        "eager_batch_norm",
        compile={"run_eagerly": True},
        optimizer=sgd(0.05),
        rows=115,
        model=by("mlp", by("batch_normalization", momentum=0.9)),
    ),
)

_FEEDS = (
    Case("arrays", feed="arrays"),
    Case("arrays_shuffled", feed="shuffled_arrays", rows=103),
    trained("arrays_other_seeds", feed="shuffled_arrays", rows=103, seed_of_its_own=True),
    trained("dataset_repeated", feed="repeated_dataset", fit={"steps_per_epoch": 3}),
    Case("generator", feed="generator", rows=103),
    Case("pydataset", feed="pydataset", rows=103),
    trained("pydataset_shuffled", feed="shuffled_pydataset", rows=103),
    trained("pydataset_other_seeds", feed="shuffled_pydataset", rows=103, seed_of_its_own=True),
    yes_or_no("validation_dataset", run="fit_only", validation="dataset"),
    yes_or_no("validation_arrays", validation="arrays", feed="arrays"),
    yes_or_no("validation_split", run="fit_only", feed="shuffled_arrays", rows=103, fit={"validation_split": 0.25}),
)

_LOOPS = (
    yes_or_no("on_batch", run="on_batch", rows=103),
    Case(
        "outputs_of_sizes",
        run="of_sizes",
        model=by("two_outputs"),
        data="named",
        optimizer=sgd(0.05),
        loss={"one": "mse", "two": "mae"},
        metrics={"one": ["mae"], "two": ["mse"]},
    ),
    Case("own_train_step", model=by("OwnTrainStep"), optimizer=sgd(0.05), rows=103, run="fit_only", metrics=None),
    *(
        trained(name, model=model, optimizer=sgd(0.05), rows=rows, metrics=None, **options)
        for name, model, options in (
            ("own_mean", by("OwnMean", "l2"), {}),
            ("own_mean_eager", by("OwnMean", "l2"), {"compile": {"run_eagerly": True}}),
            ("own_mean_execution_3", by("OwnMean"), {"compile": {"steps_per_execution": 3}}),
            ("gradient_penalty", by("GradientPenalty"), {}),
            ("average_loss", by("AverageLoss"), {}),
            ("own_compute_loss", by("OwnComputeLoss", "l2"), {}),
            ("own_sums", by("OwnSums", "l2"), {}),
            ("own_sums_in_call", by("OwnSumsInCall", "l2"), {}),
            ("own_sums_in_functions", by("OwnSumsInFunctions"), {}),
            ("own_sums_execution_3", by("OwnSums"), {"compile": {"steps_per_execution": 3}}),
            ("own_comparisons", by("OwnComparisons"), {}),
            ("own_comparisons_in_call", by("OwnComparisonsInCall"), {}),
            ("own_recurrence", by("OwnRecurrence"), {}),
            ("own_accumulation", by("OwnAccumulation"), {}),
            ("sharpness_aware", by("SharpnessAware"), {}),
            ("own_descent", by("OwnDescent"), {}),
            ("inner_steps", by("OwnDescent", 2), {}),
            ("extragradient", by("OwnDescent", 2, True), {}),
        )
        for rows in (103,)
    ),
    trained("average_loss_of_32", model=by("AverageLoss", 32), optimizer=sgd(0.05), rows=103, metrics=None),
    trained("two_towers", model=by("TwoTowers"), optimizer=sgd(0.05), metrics=None),
    trained("clipping_gradients", optimizer=by("ClippingGradients", 0.5), rows=103),
    trained("sum_of_rows", model=by("mlp", by("SumOfRows")), optimizer=sgd(0.05), rows=97),
    trained("running_statistics", model=by("mlp", by("RunningStatistics")), optimizer=sgd(0.05), rows=97),
    trained("centers", model=by("mlp", by("Centers")), optimizer=sgd(0.05), rows=97),
    trained("codebook", model=by("mlp", by("Codebook")), rows=103, compile={"steps_per_execution": 3}),
    trained("clipping_optimizer", optimizer=by("ClippingSGD", 0.5), rows=103),
    Case(
        "gan",
        model=by("Gan"),
        optimizer=sgd(0.05),
        run="fit_only",
        loss=by("losses.BinaryCrossentropy", from_logits=True),
    ),
    Case("loop_average_loss", run="loop_average_loss", optimizer=sgd(0.05), rows=103),
    Case("loop_keras_loss", run="loop_keras_loss", optimizer=sgd(0.05), rows=103),
    # A replica without rows, in the trace that makes the variables of the optimizer, and with state of layers.
    Case("loop_one_row", run="loop_average_loss", model=by("lookups"), data="tokens", rows=3, global_batch=1),
    Case("loop_last_row", run="loop_average_loss", model=by("mlp", by("MovingMean")), rows=13, global_batch=4),
    Case("save_and_resume", run="save_and_resume", rows=115, model=by("mlp", by("batch_normalization", momentum=0.9))),
)

_PRECISION = (
    Case(
        "mixed_bfloat16",
        policy="mixed_bfloat16",
        optimizer=sgd(0.05),
        tolerance=2e-2,
        reason="bfloat16 keeps 8 bits of a number (a step of 4e-3): gradients are rounded before they are summed, "
        "and sums of halves round otherwise than the sum of the whole.",
    ),
    Case(
        "mixed_float16",
        policy="mixed_float16",
        optimizer=sgd(0.05),
        tolerance=2e-3,
        reason="float16 keeps 11 bits of a number (a step of 5e-4): gradients are rounded before they are summed, "
        "and sums of halves round otherwise than the sum of the whole.",
    ),
)

# Behind the others: of which engine runs which case, the place decides (`conftest.py`).
_LATER = (
    *(
        trained(f"gradients_by_{how}", model=by("GatedGradients", how), optimizer=sgd(0.05), metrics=None, rows=103)
        for how in ("switch", "choice", "loss", "norm")
    ),
    trained("center_loss", optimizer=sgd(0.05), loss=by("CenterLoss"), metrics=None, rows=103),
    trained(
        "own_targets",
        model=by("OwnTargets"),
        data="binary",
        optimizer=sgd(0.05),
        loss="categorical_crossentropy",
        metrics=("accuracy",),
        rows=103,
    ),
    *(
        trained(f"gradients_by_{how}", model=by("GatedGradients", how), optimizer=sgd(0.05), metrics=None, rows=103)
        for how in ("clip", "vector", "branch")
    ),
    *(
        trained(name, model=by("ChosenLoss", name == "standardized"), optimizer=sgd(0.05), metrics=None, rows=103)
        for name in ("branches", "standardized")
    ),
)

_ALL = (*_OPTIMIZERS, *_LAYERS, *_LOSSES, *_MIXING, *_METRICS, *_BATCHES, *_FEEDS, *_LOOPS, *_PRECISION, *_LATER)

CASES = {case.name: case for case in _ALL}
