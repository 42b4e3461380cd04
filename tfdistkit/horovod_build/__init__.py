"""Build Horovod from its source distribution for a Python environment, install it, and check it.

TensorFlow is not loaded in this process: `target` queries the environment in a separate process.
"""
