"""Datasets of which each worker reads its part."""
