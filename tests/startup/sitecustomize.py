"""Loaded by every Python that tests start: a process with TensorFlow starts in two thirds of the time.

Keras loads scikit-learn where it is installed, which only the examples need: a second for each of many hundred
processes. Python collects garbage some hundred times while TensorFlow is imported and traces, and finds none. At its
end it looks through all objects once more, which takes another second: what is frozen is left out. Nothing of it
changes what is computed. A test that needs scikit-learn removes this folder from PYTHONPATH, and ends as users' scripts
do.
"""

import atexit
import gc
import sys

sys.modules["sklearn"] = None
gc.set_threshold(100_000, 20, 100)
atexit.register(gc.freeze)
