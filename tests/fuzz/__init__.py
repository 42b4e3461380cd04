"""The differential fuzzer: Keras programs whose results in one process and under every strategy must be equal."""
