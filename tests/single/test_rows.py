"""The rows of each part of a batch, and errors for tensors whose rows differ."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdistkit.data import same_for_all_rows
from tfdistkit.data.dataset_metadata import marks_of
from tfdistkit.data.rows import Split, rows_error, rows_of
from tfdistkit.errors import OptionError

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("total", range(12))
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_parts_are_consecutive_and_differ_by_one_row(total: int, parts: int) -> None:
    found = [rows_of(total, parts, index) for index in range(parts)]
    assert [first for first, _ in found] == [sum(count for _, count in found[:i]) for i in range(parts)]
    counts = [count for _, count in found]
    assert sum(counts) == total and max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
    traced = [rows_of(tf.constant(total), parts, tf.constant(index)) for index in range(parts)]
    assert [(int(first), int(count)) for first, count in traced] == found


def test_static_rows_that_differ_are_an_error() -> None:
    spec = {"x": tf.TensorSpec((4, 2)), "edges": tf.TensorSpec((20, 2)), "scale": tf.TensorSpec(())}
    with pytest.raises(OptionError, match="20 in `edges`, 4 in `x`"):
        Split(spec)


def test_rows_that_differ_at_run_time_are_an_error() -> None:
    forgetful = tf.data.Dataset.from_generator(
        lambda: iter([((0.0,) * 4, (0.0,) * 5)]), output_signature=(tf.TensorSpec((None,)), tf.TensorSpec((None,)))
    ).map(lambda *batch: Split((tf.TensorSpec((None,)),) * 2).rows(batch))
    with pytest.raises(tf.errors.InvalidArgumentError) as failed:
        list(forgetful)
    error = rows_error(str(failed.value))
    assert error is not None and "4 in `0`, 5 in `1`" in str(error), error
    assert rows_error("another operation failed") is None


def test_names_lead_to_tensors() -> None:
    dataset = tf.data.Dataset.from_tensors(({"x": tf.zeros((4, 2)), "table": tf.zeros((9,))}, tf.zeros((4,))))
    for name in ("table", "0/table"):
        named = same_for_all_rows(dataset, name).prefetch(1)
        batch = next(iter(named))
        assert Split(named.element_spec, marks_of(named)).cut(batch, lambda value: value[:1])[0]["table"].shape == (9,)
    with pytest.raises(OptionError, match="0/table, 0/x, 1"):
        same_for_all_rows(dataset, "tabel")
