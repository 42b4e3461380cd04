"""A job without a strategy trains a model in each process: `tfdistkit run` warns, and exits with 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_process import run_job, write_script

from tfdistkit.report import read_events

# Stubs of packages that take seconds to load: the worker only checks that they are loaded.
STUBS = {
    "tensorflow": "",
    "horovod": "",
    "keras": "class Model:\n    def __init__(self, optimizer): self.optimizer = optimizer",
}
TRAINED = "import types; model = keras.Model(types.SimpleNamespace(built=True))"

SCRIPTS = {
    "no strategy": ("import tensorflow", True),
    "an exit of its own": ("import sys, tensorflow; sys.exit()", True),
    "rank 0 saves": (f"import keras, tfdistkit; tfdistkit.is_chief(); {TRAINED}", True),
    "data, prepared in parts": ("import tensorflow, keras, tfdistkit; tfdistkit.rank(), tfdistkit.world_size()", False),
    "Horovod by itself": ("import tensorflow, horovod", False),
    "no framework": ("print(1)", False),
    "allowed in the script": ("import os, tensorflow; os.environ['TFDISTKIT_OWN_MODELS'] = '1'", False),
    "all alone": ("import os, tensorflow; os.environ['TFDISTKIT_CLUSTER'] = 'single'", False),
    "a strategy on one rank": (
        "import tensorflow, tfdistkit\nfrom tfdistkit.cluster import requested\n"
        "if tfdistkit.rank() == 1: requested.note('strategy')", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_job_without_a_strategy_gives_a_warning(case: str, tmp_path: Path) -> None:
    for name, code in STUBS.items():
        (tmp_path / f"{name}.py").write_text(code)
    script, has_warning = SCRIPTS[case]
    # Marks of an earlier run must not count.
    for rank in (0, 1):
        (tmp_path / "logs" / f"rank.{rank}").mkdir(parents=True)
        (tmp_path / "logs" / f"rank.{rank}" / "alone").touch()
    ended = run_job("-np", "2", "--log-dir", "logs", write_script(tmp_path, script), cwd=tmp_path)
    assert ended.code == 0
    told = "no process of this job made a strategy: the 2 processes worked independently"  # Not all train.
    assert (told in ended.stderr) == has_warning, ended.stderr
    assert ("TFDISTKIT_OWN_MODELS=1" in ended.stderr) == has_warning
    assert ("worked_alone" in [event["event"] for event in read_events(tmp_path / "logs")]) == has_warning


def test_a_single_process_causes_no_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("")
    ended = run_job("-q", "-np", "1", write_script(tmp_path, "import tensorflow"), cwd=tmp_path)
    assert (ended.code, ended.stderr) == (0, "")
