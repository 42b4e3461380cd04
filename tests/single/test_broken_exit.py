"""A coordinator of a broken job exits as under Python, but without TensorFlow's destructors."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
from tfdistkit.report.broken_exit import leave_at_once


class Crashes:
    '''Stands for TensorFlow's threads, which crash when what they use is taken down.'''

    def __del__(self):
        print("taken down")


at_the_end = Crashes()
atexit.register(print, "registered before")
atexit.register(leave_at_once)
atexit.register(print, "registered after")
"""


@pytest.mark.usefixtures("whole_exit")
@pytest.mark.parametrize(
    ("end", "code", "is_taken_down"),
    [
        ("raise ValueError('the reason')", 1, False),
        ("sys.exit(3)", 3, True),
        ("raise KeyboardInterrupt", -2, True),
        ("try: raise ValueError\nexcept ValueError: pass", 0, True),
    ],
)
def test_an_error_ends_the_process_at_once(end: str, code: int, is_taken_down: bool) -> None:
    command = [sys.executable, "-c", SCRIPT + end]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code
    assert ended.stdout.startswith("registered after\nregistered before\n")
    assert ("taken down" in ended.stdout) is is_taken_down
    assert ("the reason" in ended.stderr) is (code == 1)
