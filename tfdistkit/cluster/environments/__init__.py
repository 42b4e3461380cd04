"""Readers of the environments that start jobs, one scheduler a file, and what they share."""
