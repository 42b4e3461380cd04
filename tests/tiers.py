"""Which tests are `slow`: `make test` leaves them out, `make test-all` runs them; and which are `thorough`.

What finds the usual mistakes in about ten minutes on two cores is not slow: the rules of the code, the tests of one
process, a few of each kind of training, and a few jobs of each way to start. What needs root or a compiler is.

Of the slow files `.ci/run` runs a third, chosen by the second of the commit: all of them take an hour and a half, or
twice as long on a slow machine.

What takes long and repeats what runs each time, over another transport or with other numbers, is thorough; so is what
only other versions of TensorFlow and Keras change.
"""

from __future__ import annotations

import zlib

# Files of which nothing is slow, and which are no folder of one process: a few jobs for each part of the package.
_QUICK_JOBS = (
    *("test_broadcast", "test_checkpoint", "test_data_comparison", "test_horovod_options", "test_launch_function"),
    *("test_parameter_server", "test_run_command", "test_run_first_cause", "test_run_shown"),
)

# Files of many similar tests: those whose name has one of the words are not slow.
_SOME = {
    "parity/test_exactness.py": ("test_every_looser", "test_reasons_are"),
    "parity/test_seams.py": ("seam", "attribute", "name_that", "parameter", "canaries", "another_behaviour"),
    "single/test_callbacks_changed_training.py": ("equal_setups", "other_data_is_refused[arrays]"),
    "single/test_callbacks_damaged_backup.py": ("unreadable",),
    "single/test_callbacks_data_order.py": ("refused",),
    "single/test_callbacks_learning_rate.py": ("[sgd-", "[3-sgd-warm-up]", "invalid", "failed_fit"),
    "single/test_callbacks_resume.py": ("[shuffled]", "invalid", "early_stopping"),
    "single/test_data_properties.py": ("shard_by_batch", "parts_of", "seed_and_off"),
    "single/test_factory.py": ("unknown_names", "too_late"),
    "single/test_model_scope.py": ("[one_device]",),
    "single/test_table_rows.py": ("adagrad", "ids", "stateless", "output"),
    "single/test_worker_as_plain_python.py": ("exits",),
}

# Of other files the tests that take long: those whose name has one of the words are slow.
_LONG_TESTS = {
    "parallel/test_broadcast.py": ("[horovod]",),
    "parallel/test_checkpoint.py": ("kill_during_a_save",),
    "parallel/test_parameter_server.py": (
        *("[dropout-", "[averaged weights-", "[global_clipnorm-", "[clipvalue-", "[AdamW-", "[momentum-"),
        *("[a schedule-", "[loss scaling-", "[bfloat16-", "on_every_repetition"),
    ),
    "single/test_callbacks.py": ("{batch:02d}",),
    "single/test_callbacks_backup_folder.py": ("has_its_backup[2]", "has_its_backup[3]", "of_another_seed"),
    "single/test_callbacks_watching.py": ("own_files_are_removed", "timer_logs"),
    "single/test_compression_options.py": ("variance",),
    "single/test_data_policies.py": ("in_a_graph",),
    "single/test_data_tfds.py": ("each_element_once[4-", "each_element_once[7-"),
    "single/test_data_write.py": ("ends_with_its_process",),
    "single/test_data_write_sources.py": ("a_killed_one",),
    "single/test_dataset_tuning.py": ("datasets_of_devices",),
    "single/test_global_numbers.py": ("[last", "[sequences", "[map_fn", "[loop", "[end of"),
    "single/test_output_losses.py": ("[on_batches]", "[backup", "[short"),
    "single/test_quantized_sums.py": ("stays_small",),
    "single/test_row_sums.py": ("of_a_deep_network",),
    "single/test_sharded_embedding.py": ("any_number_of_shards",),
    "single/test_shm_memory.py": ("test_",),
}

# Of files of many tests, the thorough ones: those whose name has one of the words. More are marked where they are.
_THOROUGH = {
    "parallel/test_checkpoint.py": ("[horovod]",),
    "parallel/test_collectives.py": (
        *("lengths[horovod", "extreme_share_the_gradient[horovod", "strings_are_predicted[horovod"),
        *("ragged_outputs_are_predicted[horovod", "parts_differ[horovod", "not_folded[horovod"),
    ),
    "parallel/test_collectives_contrastive.py": ("multiworker-2-{'",),
    "parallel/test_comparison_in_loops.py": ("[horovod]",),
    "parallel/test_compression.py": ("bit_for_bit[horovod]",),
    "parallel/test_data_ranks.py": ("[horovod]",),
    "parallel/test_examples.py": ("one_process[char_lm", "slow_link_tells"),
    "parallel/test_horovod_backends.py": (
        "ValueError-mpi",
        "SIGKILL-mpi",
        "suspended_rank_ends_the_job[mpi]",
        "[optimizer]",
    ),
    "parallel/test_horovod_options.py": ("_over_mpi",),
    "parallel/test_keras_callbacks.py": ("in_any_order",),
    "parallel/test_learning_rate.py": ("two_replicas_of_a_process",),
    "parallel/test_models_outside.py": ("[horovod]",),
    "parallel/test_multiworker_agreement.py": ("without_a_seed",),
    "parallel/test_multiworker_faults.py": (
        *("[fusion_bytes", "[communication", "[ring-chief", "[chief-killed", "[worker-stopped"),
    ),
    "parallel/test_optimizers_of_ranks.py": ("[horovod]",),
    "parallel/test_parameter_server_callbacks.py": ("the_timer",),
    "parallel/test_parameter_server_faults.py": ("a_stopped_task",),
    "parallel/test_recommender.py": ("test_",),
    "parallel/test_stop_together.py": ("stops[horovod]", "one_rank[horovod]"),
    "parallel/test_threads.py": ("[horovod]",),
    "parity/test_functions.py": ("[multiworker-",),
    "parity/test_rows.py": ("test_",),
    "single/test_callbacks_learning_rate.py": (
        *("[3-schedule-", "[1-schedule-steps", "[1-sgd-steps", "[adamw-", "[loss scale-warm", "[loss scale-steps"),
        *("restored[3]", "tfdistkit[1-schedule]", "tfdistkit[3-sgd]"),
    ),
    "single/test_callbacks_resume.py": ("[2 epochs-10", "[4-11", "with_their_state[8]", "with_their_state[13]"),
}

# Of the tests of two devices, the files that take as long as all others together.
_LONG_FILES = (
    *("branches.py", "changed_gradients.py", "changed_gradients_in_loops.py", "compared_rows.py", "eager_steps.py"),
    *("ragged_inputs.py", "reducers.py", "stateful.py", "users_steps.py", "users_variables.py", "variables.py"),
    *("step_check_losses.py", "step_check_reads.py", "step_check_state.py"),
)

# Into how many parts `.ci/run` divides the slow files.
TURNS = 3

# Of the parity table, the cases that `mirrored` and `multiworker` run each time: one of each kind.
QUICK_CASES = (
    *("dense_sgd", "loss_scale_clip", "ema", "accumulation", "batch_norm_97", "masks_103", "two_outputs"),
    *("own_metrics_65", "on_batch_1", "execution_3_embedding", "eager", "own_train_step", "loop_average_loss"),
    *("gradients_by_vector", "branches"),
)


def is_slow(path: str, name: str, parameters: dict[str, object]) -> bool:
    """Returns whether a test is slow.

    Args:
        path: Its file, from the folder `tests`.
        name: Its name, with its parameters.
        parameters: Its parameters.
    """
    folder, _, file = path.partition("/")
    if path == "parity/test_exactness.py" and "case" in parameters:
        return parameters["engine"] not in ("mirrored", "multiworker") or parameters["case"] not in QUICK_CASES
    if path == "single/test_two_devices.py":
        return getattr(parameters["file"], "name", "") in _LONG_FILES
    if any(word in name for word in _LONG_TESTS.get(path, ())):
        return True
    if path in _SOME:
        return not any(word in name for word in _SOME[path])
    if path == "fuzz/test_fuzz.py":
        return "as_in_one_process" in name
    if folder == "parallel":
        return file.removesuffix(".py") not in _QUICK_JOBS
    return folder not in ("house", "single")


def is_thorough(path: str, name: str) -> bool:
    """Returns whether a test takes long and repeats others.

    Args:
        path: Its file, from the folder `tests`.
        name: Its name, with its parameters.
    """
    return any(word in name for word in _THOROUGH.get(path, ()))


def is_of_turn(path: str, turn: int, parameters: dict[str, object] | None = None) -> bool:
    """Returns whether slow tests of a file run in a turn: parity and random faults in each, of the others a third.

    Args:
        path: Its file, from the folder `tests`.
        turn: A number; its remainder by `TURNS` chooses the third.
        parameters: The parameters of a test.
    """
    if path == "single/test_two_devices.py" and parameters:
        path = f"single/two_devices/{getattr(parameters['file'], 'name', '')}"
    in_each = ("parity/", "fuzz/", "parallel/test_random_faults")
    return path.startswith(in_each) or zlib.crc32(path.encode()) % TURNS == turn % TURNS
