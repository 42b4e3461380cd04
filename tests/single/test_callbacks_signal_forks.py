"""`LastSignal` in processes that fork."""

from __future__ import annotations

import subprocess
import sys

# The hook stands for a signal that comes right after the fork: Python calls it before the one of tfdistkit.
SCRIPT = """
import os, signal, threading, time
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from tfdistkit.callbacks.last_signal import LastSignal

def fork():
    child = os.fork()
    if not child:
        time.sleep(20)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

with LastSignal(0.1) as last:
    fork()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    time.sleep(0.5)  # The deadline of a signal that this process did not get would end it.
    print(last.number, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
fork()
"""


def test_a_signal_right_after_a_fork_ends_the_forked_process_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout.split("\n")) == (0, ["-15", "-15", "0 set()", "-15", ""]), ended.stderr
