"""`tfdistkit data write`."""
