"""`tfdistkit run`."""
