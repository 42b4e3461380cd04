"""Implements `tfdistkit run`."""
