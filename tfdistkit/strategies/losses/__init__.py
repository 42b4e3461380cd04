"""Losses that combine the rows of a batch: found in the graph, computed from the rows of all replicas."""
