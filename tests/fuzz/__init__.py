"""The differential fuzzer: Keras programs that have to come out the same in one process and under every strategy."""
