"""What `StepTimer` counts is in the events of a job: the chief leaves it in its folder, epoch by epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdistkit.cli.main import main
from tfdistkit.report.events import read_events
from tfdistkit.report.progress import COMMUNICATION_FILE, read_communication

# Without TensorFlow: what the callback calls.
SCRIPT = """
import time
from tfdistkit.report.progress import leave_communication
for epoch in (1, 2):
    leave_communication({"epoch": epoch, "bytes_per_step": 4e6, "bytes_ratio": 0.5, "steps_per_sync": 100.0})
    time.sleep(0.5)  # several polls of the launcher
"""


def test_events_tell_each_epoch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["run", "-np", "2", "--log-dir", str(tmp_path / "logs"), str(script)]) == 0
    events = [one for one in read_events(tmp_path / "logs") if one["event"] == "communication"]
    assert [(one["rank"], one["epoch"]) for one in events] == [(0, 1), (0, 2)]
    assert events[0]["bytes_per_step"] == 4e6 and events[0]["bytes_ratio"] == 0.5
    assert events[0]["steps_per_sync"] == 100 and "seconds_per_sync" not in events[0]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"event": "x", "epoch": "1"}', '{"bytes_ratio": NaN, "epoch": true}']
)
def test_what_is_none_of_it_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / COMMUNICATION_FILE).write_text(text)
    assert read_communication(tmp_path) == {}
