"""The GPU of a SLURM task: the first of its own ones, or the one of its local rank among all."""

from __future__ import annotations

import pytest
import tensorflow as tf
from slurm_steps import put, step

from tfdistkit.cluster import ClusterSpec, TaskSpec
from tfdistkit.errors import UnsupportedError
from tfdistkit.strategies.devices import take_gpu_of_local_rank


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("visible", "of_step", "local_rank", "taken"),
    [
        # --gres=gpu:4: all tasks see all.
        ("0,1,2,3", "4", 2, "GPU:2"),
        # --gpus-per-task=2: each sees its own two.
        ("4,5", "8", 2, "GPU:0"),
        ("0,1", "8", 0, "GPU:0"),
        # Without SLURM's variables: by the local rank.
        ("0,1,2,3", None, 3, "GPU:3"),
    ],
)
def test_a_task_takes_one_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str, of_step: str | None, local_rank: int, taken: str
) -> None:
    """With TensorFlow's two functions replaced: no test machine has GPUs."""
    chosen = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"GPU:{i}" for i in range(len(names))])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: chosen.append(device))
    names = visible.split(",")
    (variables, *_) = step(["n1"] * 4, "n1", "4")
    put(monkeypatch, variables, {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": of_step})
    take_gpu_of_local_rank(ClusterSpec(task=TaskSpec("worker", local_rank), local_rank=local_rank, local_world_size=4))
    assert chosen == [taken]


@pytest.mark.tensorflow
def test_too_few_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0", "GPU:1"])
    (variables, *_) = step(["n1"] * 3, "n1", "3")
    put(monkeypatch, variables, {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"})
    with pytest.raises(UnsupportedError, match="3 workers and 2 GPUs"):
        take_gpu_of_local_rank(ClusterSpec(local_rank=2, local_world_size=3))
