"""Loads data so that each worker reads only its shard."""
