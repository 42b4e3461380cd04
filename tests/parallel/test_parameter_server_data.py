"""What `fit` takes under `parameter_server`: each element is trained on once an epoch, whoever reads it."""

from __future__ import annotations

import pytest
from coordinator_setup import ROWS, SETUP, STEPS, last_report

pytestmark = [pytest.mark.tensorflow, pytest.mark.parametrize("engine", ["parameter_server"])]

# What is given to `fit` for 3 epochs. Data that repeat have no end: there `fit` gets the number of steps of an epoch.
DATA = {
    "arrays": "x, y, batch_size=BATCH",
    "arrays in order": "x, y, batch_size=BATCH, shuffle=False",
    "tf.data": "data.shuffle(N).batch(BATCH)",
    "a distributed dataset": "strategy.experimental_distribute_dataset(data.batch(BATCH))",
    "a PyDataset": "Sequence()",
    "a PyDataset with threads": "Sequence(workers=2, max_queue_size=4)",
    "a dataset of each worker": "strategy.distribute_datasets_from_function(of_worker)",
}
ENDLESS = {
    "repeated tf.data": "data.batch(BATCH).repeat(), steps_per_epoch=12",
    "a generator": "batches_for_ever(), steps_per_epoch=12",
}

SOURCES = """
    def batches_for_ever():
        while True:
            for i in range(0, N, BATCH):
                yield x[i : i + BATCH], y[i : i + BATCH]

    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 12
        def __getitem__(self, i):
            return x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]

    pipelines = set()
    def of_worker(context):
        pipelines.add((context.num_input_pipelines, context.input_pipeline_id))
        own = tf.data.Dataset.from_tensor_slices((x, y))
        return own.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(N).batch(BATCH)
"""


def cases(kinds: dict[str, str], model: str) -> list:
    """One test for each kind of data, with its part."""
    parts = {kind: f"{SOURCES}    report(**train({model}, {args}))" for kind, args in kinds.items()}
    return [pytest.param(kind, marks=pytest.mark.part(code, setup=SETUP)) for kind, code in parts.items()]


@pytest.mark.parametrize("kind", cases({**DATA, **ENDLESS}, "plain()"))
def test_each_element_once_an_epoch(printed: list[str], kind: str) -> None:
    seen = last_report(printed)
    assert seen["steps"] == 3 * STEPS
    assert seen["seen"] == seen["once"] == [ROWS] * 3
    assert seen["used"] == [3] * ROWS


@pytest.mark.parametrize("kind", cases(DATA, "plain(5)"))
def test_executions_of_5_5_and_2_steps(printed: list[str], kind: str) -> None:
    seen = last_report(printed)
    assert seen["steps"] == 3 * STEPS
    assert seen["seen"] == seen["once"] == [ROWS] * 3
    assert seen["used"] == [3] * ROWS


@pytest.mark.part(
    SOURCES + "    report(**train(plain(5), data.batch(BATCH).repeat(), steps_per_epoch=12))", setup=SETUP
)
def test_executions_of_endless_data_are_whole_ones_as_keras_has_them(printed: list[str]) -> None:
    seen = last_report(printed)
    assert seen["steps"] == 3 * 15 and sum(seen["used"]) == sum(seen["seen"])


OF_WORKERS = (
    SOURCES
    + """
    seen = train(plain(), strategy.distribute_datasets_from_function(of_worker), steps_per_epoch=4)
    def repeated(context):
        return of_worker(context).repeat()
    again = train(plain(), strategy.distribute_datasets_from_function(repeated), steps_per_epoch=12)
    report(pipelines=sorted(pipelines), over_all=seen, repeated=again)
"""
)


@pytest.mark.part(OF_WORKERS, setup=SETUP)
def test_each_worker_has_a_pipeline_of_its_own_and_steps_are_counted(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["pipelines"] == [[2, 0], [2, 1]]
    seen = found["over_all"]  # Epochs that together have the steps of the data.
    assert seen["steps"] == STEPS and seen["used"] == [1] * ROWS and seen["seen"] == seen["once"]
    # The worker that is faster takes more steps, so that one row may be used more often than another.
    again = found["repeated"]
    assert again["steps"] == 3 * STEPS and sum(again["used"]) == sum(again["seen"])
    assert all(5 * STEPS <= rows <= 8 * STEPS for rows in again["seen"])


VALIDATION = (
    SOURCES
    + """
    def validate(data, **options):
        return {name: v[-1] for name, v in train(plain(), x, y, epochs=2, validation_data=data, **options).items()
                if name.startswith("val")}
    def thirty(context):
        return of_worker(context).unbatch().filter(lambda x, y: y[1] < 30).batch(BATCH)
    report(arrays=validate((x[:30], y[:30])), dataset=validate(data.take(30).batch(7)), sequence=validate(Sequence()),
         steps=validate(data.batch(BATCH), validation_steps=3), split=validate(None, validation_split=0.2),
         of_workers=validate(strategy.distribute_datasets_from_function(thirty)))
"""
)


@pytest.mark.part(VALIDATION, setup=SETUP)
def test_validation_data(printed: list[str]) -> None:
    rows = {"arrays": 30, "dataset": 30, "sequence": 90, "steps": 24, "split": 18, "of_workers": 30}
    found = last_report(printed)
    for name, expected in rows.items():
        assert found[name]["val_seen"] == found[name]["val_once"] == expected, name
        assert 0 < found[name]["val_loss"] < 5 and 0 <= found[name]["val_auc"] <= 1


OF_ONE_WORKER = """
    import tfdistkit.errors
    def outcome(data):
        try:
            return train(plain(), data.batch(BATCH), epochs=1)["seen"]
        except tfdistkit.errors.UnsupportedError as error:
            return str(error)
    whole = outcome(data.shard(3, 0))
    report(another=whole, of_rank=outcome(data.shard(tfdistkit.world_size(), tfdistkit.rank())))
"""


@pytest.mark.part(OF_ONE_WORKER, setup=SETUP)
def test_the_part_of_a_worker_is_refused(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["another"] == [ROWS // 3]
    assert "must read all data" in found["of_rank"] and ".shard(2, 0)" in found["of_rank"]
