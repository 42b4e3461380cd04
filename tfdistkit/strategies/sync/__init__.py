"""Synchronous steps: which rows a replica gets, what they weigh, and what replicas wait for."""
