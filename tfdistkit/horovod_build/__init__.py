"""Build Horovod from its source distribution for a Python environment, install it, and check it.

No TensorFlow is loaded here: the environment that Horovod is for is asked in a process of its own (`target`).
"""
