"""Metrics and logs that are those of all replicas."""
