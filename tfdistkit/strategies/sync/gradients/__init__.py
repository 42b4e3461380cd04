"""Gradients of replicas: weighted by rows, summed by the reducer, sparse ones and those that are missing."""
