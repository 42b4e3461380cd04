"""Loaded by every Python that tests start: a process with TensorFlow takes half of the time.

- Keras loads scikit-learn where it is installed, which only the examples need: a second for each of many hundred
  processes. A test that needs it removes this folder from PYTHONPATH.
- Python collects garbage some hundred times while TensorFlow is imported and traces, and finds none.
- At its end a process takes down all modules, which takes one or two seconds: what is frozen stays. Tests of how jobs
  end, and those on real hosts, end as users' scripts do (the fixture `whole_exit`).

Nothing of it changes what is computed.
"""

import atexit
import gc
import os
import sys

sys.modules["sklearn"] = None
gc.set_threshold(100_000, 20, 100)
if "TESTS_WHOLE_EXIT" not in os.environ:
    atexit.register(gc.freeze)
