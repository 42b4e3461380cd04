"""Metrics and logs of the global batch: updates, results and synchronization over the replicas."""
