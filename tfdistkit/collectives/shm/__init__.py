"""Collectives between the ranks of one host through shared memory: Linux, CPUs, no compiler, no open port."""
