"""Synchronous steps: the rows of each replica, their weights, and the collectives between replicas."""
